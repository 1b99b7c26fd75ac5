"""Apply the insert-only patches of native/patches to an unpacked source tree.

A patch here is a zero-context unified diff whose hunks only insert lines. Without context lines a plain patch
tool trusts the line number alone, so every hunk header also carries the line it inserts after, stripped:

    @@ -382,0 +384,4 @@ bool llama_kv_cache::seq_rm(llama_seq_id seq_id, llama_pos p0, llama_pos p1) {

`git apply --unidiff-zero` and `patch -p1` skip that text; here it is checked. A patch that does not fit is
refused, with the patch, the hunk, and what stands there instead.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

HUNK = re.compile(r"@@ -(\d+),0 \+(\d+)(?:,(\d+))? @@ (.*)")
PREAMBLE = ("diff ", "index ", "From ", "Subject:", "#")


class PatchError(Exception):
    """A patch is malformed or does not fit the source it is applied to."""


@dataclass(frozen=True)
class Hunk:
    """Lines to insert after line `after` (1-based) of the file as it was before this patch."""

    where: str  # "NAME.patch line N", for messages
    after: int
    new_start: int
    anchor: str
    lines: tuple[str, ...]


def parse_patch(name: str, text: str) -> dict[str, list[Hunk]]:
    """Return the hunks of a patch by the path of the file they change.

    Raises: PatchError for anything but insertions with an anchor.
    """
    files: dict[str, list[Hunk]] = {}
    hunks: list[Hunk] | None = None
    lines = text.splitlines()
    i = 0
    while i < len(lines):
        line, where = lines[i], f"{name} line {i + 1}"
        i += 1
        if line.startswith("--- "):
            if i == len(lines) or not lines[i].startswith("+++ "):
                raise PatchError(f"{where}: '---' without '+++' after it")
            path = _path(lines[i], where)
            if _path(line, where) != path:
                raise PatchError(f"{where}: renames a file; only insertions are taken")
            if path in files:
                raise PatchError(f"{where}: {path} appears twice")
            hunks = files.setdefault(path, [])
            i += 1
        elif line.startswith("@@"):
            if hunks is None:
                raise PatchError(f"{where}: a hunk before any '---' and '+++'")
            n, hunk = _hunk(where, lines, i - 1)
            if hunks and hunk.after < hunks[-1].after:
                raise PatchError(f"{where}: hunks must stand in the order of their lines")
            hunks.append(hunk)
            i += n
        elif line.startswith("-"):
            raise PatchError(f"{where}: deletes a line; only insertions are taken: {line!r}")
        elif line.startswith(" "):
            raise PatchError(f"{where}: a context line; patches carry none: {line!r}")
        elif hunks is not None or (line and not line.startswith(PREAMBLE)):
            raise PatchError(f"{where}: not understood: {line!r}")
    if not any(files.values()):
        raise PatchError(f"{name}: no hunk in it")
    return files


def _path(line: str, where: str) -> str:
    """The path in a '--- a/...' or '+++ b/...' line, without its first folder."""
    parts = PurePosixPath(line[4:].split("\t")[0].strip()).parts
    if len(parts) < 2 or parts[0] not in ("a", "b") or ".." in parts:
        raise PatchError(f"{where}: the path must be a/... or b/..., inside the tree: {line!r}")
    return str(PurePosixPath(*parts[1:]))


def _hunk(where: str, lines: Sequence[str], start: int) -> tuple[int, Hunk]:
    """The hunk whose header is lines[start], and the number of lines that belong to it after the header."""
    match = HUNK.fullmatch(lines[start])
    if match is None:
        raise PatchError(
            f"{where}: hunk header is not '@@ -LINE,0 +LINE,COUNT @@ TEXT OF THE LINE IT FOLLOWS': "
            f"{lines[start]!r}"
        )
    count = int(match[3] or 1)
    body = lines[start + 1 : start + 1 + count]
    if len(body) < count or not all(line.startswith("+") for line in body):
        raise PatchError(
            f"{where}: the header promises {count} inserted lines, but not so many '+' lines follow"
        )
    hunk = Hunk(where, int(match[1]), int(match[2]), match[4].strip(), tuple(line[1:] for line in body))
    if hunk.after < 1 or not hunk.anchor:
        raise PatchError(f"{where}: a hunk must name the line it follows: {lines[start]!r}")
    return count, hunk


def insert(path: str, text: str, hunks: Sequence[Hunk]) -> str:
    """Return text with the lines of hunks inserted.

    Raises: PatchError when a line to insert after is not the one its hunk names.
    """
    old = text.split("\n")
    new: list[str] = []
    done = n_inserted = 0
    for hunk in hunks:
        found = old[hunk.after - 1].strip() if hunk.after <= len(old) else None
        if found != hunk.anchor:
            instead = "the file ends before it" if found is None else f"there stands {found!r}"
            raise PatchError(
                f"{hunk.where} does not apply to {path}: line {hunk.after} should be {hunk.anchor!r}, "
                f"but {instead}{_elsewhere(old, hunk.anchor)}. "
                "The source is not the one the patches were written for."
            )
        if hunk.new_start != hunk.after + n_inserted + 1:
            raise PatchError(
                f"{hunk.where}: the new line number is {hunk.new_start}, "
                f"but {hunk.after} + {n_inserted} inserted before + 1 is {hunk.after + n_inserted + 1}"
            )
        new += old[done : hunk.after]
        new += hunk.lines
        done = hunk.after
        n_inserted += len(hunk.lines)
    return "\n".join(new + old[done:])


def _elsewhere(lines: Sequence[str], anchor: str) -> str:
    at = [str(i) for i, line in enumerate(lines, 1) if line.strip() == anchor]
    return f" (that text is at line {', '.join(at[:5])})" if at else ""


def patched(sources: Mapping[str, str], patches: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Return the new text of every file that patches change, applied in order.

    Parameters
    ----------
    sources : texts by path, before any patch; must hold every path the patches name
    patches : (name, text) of each patch
    """
    result: dict[str, str] = {}
    for name, text in patches:
        for path, hunks in parse_patch(name, text).items():
            before = result.get(path, sources.get(path))
            if before is None:
                raise PatchError(f"{name}: changes {path}, which is not in the source tree")
            result[path] = insert(path, before, hunks)
    return result


def read_patches(folder: Path) -> list[tuple[str, str]]:
    """Return (name, text) of every *.patch in folder, in the order of their names."""
    return [(path.name, path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.patch"))]


def apply_tree(tree: Path, pristine: Path, patches: Sequence[tuple[str, str]]) -> list[str]:
    """Make tree its pristine self plus patches; return the paths that were written.

    The first text of each changed file is kept under pristine, so that changed patches can be applied again
    without unpacking. A file whose text stays the same is not written: it need not be compiled again.
    """
    paths = {path for name, text in patches for path in parse_patch(name, text)}
    if pristine.is_dir():
        paths |= {path.relative_to(pristine).as_posix() for path in pristine.rglob("*") if path.is_file()}
    sources = {}
    for path in sorted(paths):
        kept = pristine / path
        if not kept.is_file():
            if not (tree / path).is_file():
                continue
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_bytes((tree / path).read_bytes())
        sources[path] = kept.read_bytes().decode("utf-8")
    written = []
    for path, text in {**sources, **patched(sources, patches)}.items():
        data = text.encode("utf-8")
        if (tree / path).read_bytes() != data:
            (tree / path).write_bytes(data)
            written.append(path)
    return written


def main() -> int:
    if len(sys.argv) != 4:
        print("usage: apply_patches.py TREE PRISTINE PATCHES", file=sys.stderr)
        return 2
    tree, pristine, folder = map(Path, sys.argv[1:])
    try:
        for path in apply_tree(tree, pristine, read_patches(folder)):
            print(f"patched {path}")
    except PatchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

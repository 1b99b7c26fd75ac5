"""The patches of native/patches insert lines where they say, and refuse in words any other source."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).parents[2]


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


apply_patches = load("apply_patches")
PatchError = apply_patches.PatchError

SOURCE = "int f() {\n    return 1;\n}\n\nint g() {\n    return 2;\n}\n"
PATCH = """\
--- a/src/f.c
+++ b/src/f.c
@@ -1,0 +2,2 @@ int f() {
+    hook();
+
@@ -5,0 +8,1 @@ int g() {
+    hook();
"""
PATCHED = "int f() {\n    hook();\n\n    return 1;\n}\n\nint g() {\n    hook();\n    return 2;\n}\n"


def apply(*patches: str, source: str = SOURCE) -> str:
    named = [(f"{i:04}.patch", text) for i, text in enumerate(patches, 1)]
    return str(apply_patches.patched({"src/f.c": source}, named)["src/f.c"])


def test_lines_are_inserted_after_their_anchor() -> None:
    assert apply(PATCH) == PATCHED


def test_a_second_patch_counts_lines_of_the_first_ones_result() -> None:
    second = "--- a/src/f.c\n+++ b/src/f.c\n@@ -2,0 +3 @@ hook();\n+    again();\n"
    assert apply(PATCH, second) == PATCHED.replace("hook();\n", "hook();\n    again();\n", 1)


def test_a_changed_anchor_is_refused_with_patch_hunk_and_both_texts() -> None:
    with pytest.raises(PatchError) as caught:
        apply(PATCH, source=SOURCE.replace("int g()", "int g(int x)"))
    text = str(caught.value)
    assert "0001.patch line 6" in text and "src/f.c" in text and "line 5" in text
    assert "'int g() {'" in text and "'int g(int x) {'" in text


def test_a_moved_anchor_is_refused_and_its_place_told() -> None:
    with pytest.raises(PatchError, match=r"that text is at line 2"):
        apply(PATCH, source="// new first line\n" + SOURCE)


def test_an_anchor_past_the_end_is_refused() -> None:
    with pytest.raises(PatchError, match="the file ends before it"):
        apply("--- a/src/f.c\n+++ b/src/f.c\n@@ -99,0 +100 @@ int f() {\n+x\n")


HEAD = "--- a/src/f.c\n+++ b/src/f.c\n"


@pytest.mark.parametrize(
    ("patch", "reason"),
    [
        (HEAD + "@@ -2,1 +2,1 @@ int f() {\n-    return 1;\n+    return 3;\n", "hunk header"),
        (HEAD + "@@ -1,0 +2 @@ int f() {\n+x\n-    return 1;\n", "deletes a line"),
        (HEAD + "@@ -1,0 +2 @@ int f() {\n+x\n     return 1;\n", "context line"),
        (HEAD + "@@ -1,0 +2,2 @@ int f() {\n+x\n", "promises 2 inserted lines"),
        (HEAD + "@@ -1,0 +2 @@\n+x\n", "hunk header"),
        (HEAD + "@@ -1,0 +9 @@ int f() {\n+x\n", "new line number is 9"),
        (HEAD + "@@ -5,0 +6 @@ int g() {\n+x\n@@ -1,0 +3 @@ int f() {\n+x\n", "order of their lines"),
        ("--- a/src/f.c\n+++ b/src/g.c\n@@ -1,0 +2 @@ int f() {\n+x\n", "renames"),
        ("--- a/../f.c\n+++ b/../f.c\n@@ -1,0 +2 @@ int f() {\n+x\n", "inside the tree"),
        ("--- a/src/h.c\n+++ b/src/h.c\n@@ -1,0 +2 @@ int f() {\n+x\n", "not in the source tree"),
        ("@@ -1,0 +2 @@ int f() {\n+x\n", "before any"),
        ("", "no hunk"),
        (HEAD, "no hunk"),
    ],
)
def test_what_is_not_an_insertion_is_refused(patch: str, reason: str) -> None:
    with pytest.raises(PatchError, match=reason) as caught:
        apply(patch)
    assert "0001.patch" in str(caught.value)


def make_patch(lines: list[str], inserts: dict[int, list[str]]) -> str:
    """A patch in our format that inserts lines after the given line numbers."""
    out, n_before = [HEAD], 0
    for after, new in sorted(inserts.items()):
        out.append(f"@@ -{after},0 +{after + n_before + 1},{len(new)} @@ {lines[after - 1].strip()}\n")
        out += [f"+{line}\n" for line in new]
        n_before += len(new)
    return "".join(out)


word = st.from_regex(r"[ab{};]{1,6}", fullmatch=True)


@given(st.lists(word, min_size=1, max_size=12), st.data())
def test_any_set_of_insertions_gives_the_lines_one_would_write_by_hand(
    lines: list[str], data: st.DataObject
) -> None:
    at = st.integers(1, len(lines))
    inserts = data.draw(st.dictionaries(at, st.lists(word, min_size=1, max_size=3), min_size=1))
    expected = []
    for number, line in enumerate(lines, 1):
        expected += [line, *inserts.get(number, [])]
    source = "".join(f"{line}\n" for line in lines)
    assert apply(make_patch(lines, inserts), source=source) == "".join(f"{line}\n" for line in expected)


def test_a_tree_can_be_patched_again_and_only_changed_files_are_written(tmp_path: Path) -> None:
    tree, pristine = tmp_path / "tree", tmp_path / "pristine"
    (tree / "src").mkdir(parents=True)
    for name in ("f.c", "g.c"):
        (tree / "src" / name).write_text(SOURCE)
    other = PATCH.replace("f.c", "g.c")
    both = [("0001.patch", PATCH), ("0002.patch", other)]
    assert apply_patches.apply_tree(tree, pristine, both) == ["src/f.c", "src/g.c"]
    assert apply_patches.apply_tree(tree, pristine, both) == []
    changed = [("0001.patch", PATCH), ("0002.patch", other.replace("hook", "other_hook"))]
    assert apply_patches.apply_tree(tree, pristine, changed) == ["src/g.c"]
    assert apply_patches.apply_tree(tree, pristine, changed[:1]) == ["src/g.c"]
    assert (tree / "src/f.c").read_text() == PATCHED and (tree / "src/g.c").read_text() == SOURCE


def test_nothing_is_written_when_a_later_patch_does_not_fit(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src/f.c").write_text(SOURCE)
    patches = [("0001.patch", PATCH), ("0002.patch", HEAD + "@@ -1,0 +2 @@ int z() {\n+x\n")]
    with pytest.raises(PatchError, match="0002"):
        apply_patches.apply_tree(tmp_path, tmp_path / "pristine", patches)
    assert (tmp_path / "src/f.c").read_text() == SOURCE


@pytest.mark.parametrize("tool", [["git", "apply", "--unidiff-zero", "-"], ["patch", "-p1", "--quiet"]])
def test_plain_tools_make_the_same_of_a_patch(tool: list[str], tmp_path: Path) -> None:
    if shutil.which(tool[0]) is None:
        pytest.skip(f"{tool[0]} is not installed")
    (tmp_path / "src").mkdir()
    (tmp_path / "src/f.c").write_text(SOURCE)
    subprocess.run(tool, cwd=tmp_path, input=PATCH, text=True, check=True)
    assert (tmp_path / "src/f.c").read_text() == PATCHED


@pytest.mark.parametrize(
    "path", sorted((ROOT / "native" / "patches").glob("*.patch")), ids=lambda path: path.stem
)
def test_our_patches_are_insertions_of_a_handful_of_lines(path: Path) -> None:
    files = apply_patches.parse_patch(path.name, path.read_text())
    inserted = sum(len(hunk.lines) for hunks in files.values() for hunk in hunks)
    assert re.fullmatch(r"\d{4}-[a-z0-9-]+", path.stem) and inserted <= 40

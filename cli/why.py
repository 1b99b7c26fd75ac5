"""An explanation in a terminal: each line of the text with how much of it is left."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.style import Style
from rich.text import Text

from h2o_gguf.cli.render import notice, show_bytes
from h2o_gguf.errors import OptionError

if TYPE_CHECKING:
    from h2o_gguf.explain import Explanation

__all__ = ["check_page", "show", "write_page"]

Shares = NDArray[np.float64]
N_LINES = 40  # at the beginning, and as many at the end
N_LISTED = 10
N_AROUND = 3  # tokens shown around one that is listed
PALE, FULL = (238, 244, 251), (38, 98, 158)
# What a text holds must not steer the terminal.
VISIBLE = {c: 0x2400 + c for c in range(32) if chr(c) not in "\n\t"} | {0x7F: 0x2421}
VISIBLE |= dict.fromkeys([*range(0x80, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)], 0xFFFD)


def show(explanation: Explanation, console: Console) -> None:
    """Print the text, shaded where there are colours, and what the answer looked at."""
    e = explanation
    console.print(
        f"{e.policy}, budget {e.budget:,}: how much of each line is held, over {e.left.shape[0]} layers of "
        f"{e.left.shape[1]} KV heads",
        markup=False,
    )
    held = e.held() / e.n_pairs
    heavy = e.marks(np.count_nonzero(e.heavy, axis=(0, 1)))
    recalled = e.recalled()
    lines = _lines(e.texts)
    hidden = range(N_LINES, len(lines) - N_LINES)
    for i, line in enumerate(lines):
        if i not in hidden:
            console.print(_shaded(line, held, heavy, e.marks(recalled)))
        elif i == hidden.start:
            of_all = [token for each in lines[hidden.start : hidden.stop] for token, _ in each]
            console.print(f"{_percent(held, of_all)} ... {len(hidden):,} lines ...")
    if recalled.any():
        title = "entries that were evicted and fetched back (italic above), in % of the layers and heads"
        _list(console, e, title, recalled[None, :] / e.n_pairs)
    _list(console, e, "kept entries the answer looked at, in % of its attention", e.kept)
    if e.missed is None:
        console.print(f"\nwhat a full cache would have used is not known: {e.why_not_missed}", markup=False)
    else:
        total = float(e.missed.sum(-1).mean())
        title = f"evicted entries a full cache would have used, {total:.1%} of its attention in all"
        _list(console, e, title, e.missed)


def check_page(path: Path) -> None:
    """Raise OptionError where a page cannot be written, before much is read for it."""
    if path.is_dir() or not path.parent.is_dir():
        reason = "it is a folder" if path.is_dir() else f"there is no folder {str(path.parent)!r}"
        raise OptionError(f"cannot write {str(path)!r}: {reason}; name another file", "out")
    try:
        if not path.exists():
            TemporaryFile(dir=path.parent).close()
        elif not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, "it is not yours to write")
    except OSError as error:
        raise OptionError(
            f"cannot write {str(path)!r}: {error.strerror or error}; name another file", "out"
        ) from error


def write_page(explanation: Explanation, path: Path) -> None:
    """Write the page and say so."""
    explanation.write(path)
    notice(f"{path} ({show_bytes(os.path.getsize(path))}) shows what was kept; open it in a browser")


def _lines(texts: tuple[str, ...]) -> list[list[tuple[int, str]]]:
    """The tokens of each line, and what they say in it."""
    lines: list[list[tuple[int, str]]] = [[]]
    for i, text in enumerate(texts):
        first, *others = text.split("\n")
        lines[-1].append((i, first))
        lines += [[(i, part)] if part else [] for part in others]
    return lines


def _percent(held: Shares, tokens: list[int]) -> str:
    """How much of these tokens is held; of those that were read."""
    found = [held[i] for i in tokens if i < len(held)]
    return f"{np.mean(found):4.0%}" if found else "    "


def _shaded(
    line: list[tuple[int, str]], held: Shares, heavy: NDArray[np.bool_], recalled: NDArray[np.bool_]
) -> Text:
    shaded = Text.assemble((_percent(held, [token for token, _ in line]), "dim"), " ")
    for i, part in line:
        shaded.append(
            part.translate(VISIBLE), _style(held[i], heavy[i], recalled[i]) if i < len(held) else None
        )
    shaded.rstrip()
    return shaded


def _style(share: float, is_heavy: np.bool_, is_recalled: np.bool_) -> Style:
    if share == 0:
        return Style(dim=True, strike=True)
    depth = share**0.5
    red, green, blue = (round(p + depth * (f - p)) for p, f in zip(PALE, FULL, strict=True))
    ink = "white" if depth > 0.6 else "black"
    back = f"rgb({red},{green},{blue})"
    return Style(color=ink, bgcolor=back, underline=bool(is_heavy), italic=bool(is_recalled))


def _list(console: Console, e: Explanation, title: str, shares: NDArray[np.floating[Any]]) -> None:
    console.print(f"\n{title}", markup=False)
    mean = shares.mean(0)
    for pos in np.argsort(-mean, kind="stable")[:N_LISTED]:
        if mean[pos] > 0:
            around = "".join(e.texts[max(0, pos - N_AROUND) : pos + N_AROUND + 1])
            flat = around.replace("\n", " ").replace("\t", " ").translate(VISIBLE)
            console.print(f"{mean[pos]:8.2%}  {pos:7,}  {flat}", markup=False)

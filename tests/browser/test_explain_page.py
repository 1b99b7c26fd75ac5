"""The page of an explanation, read back through a browser from a file."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from explain_fakes import explanation, gaps_of

from h2o_gguf.explain import HELD, Explanation
from h2o_gguf.explain.page import N_LISTED

WORDS = [f" w{i}" if i % 12 else f"w{i}\n" for i in range(320)]


@dataclass
class Page:
    """An open page."""

    driver: Any

    def run(self, script: str, *arguments: object) -> Any:
        return self.driver.execute_script(script, *arguments)

    def set(self, name: str, value: object) -> None:
        """Change a control as a person would."""
        self.run(
            "const e = document.getElementById(arguments[0]); e.value = String(arguments[1]);"
            "e.dispatchEvent(new Event(e.type === 'range' ? 'input' : 'change'));",
            name, value,
        )  # fmt: skip
        self.driver.execute_async_script(
            "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(done))"
        )

    def shares(self) -> list[float]:
        """How dark each token is."""
        return list(
            self.run(
                "return [...document.querySelectorAll('#text .t')]"
                ".map((t) => Number(t.style.getPropertyValue('--s')))"
            )
        )

    def marked(self, mark: str) -> list[int]:
        """Tokens with a class."""
        return list(
            self.run(
                "return [...document.querySelectorAll('#text .t')].flatMap("
                "(t, i) => t.classList.contains(arguments[0]) ? [i] : [])", mark,
            )
        )  # fmt: skip

    def token(self, i: int, event: str = "click") -> str:
        """Point at a token or click it; return what is said of it."""
        self.run(
            "document.querySelectorAll('#text .t')[arguments[0]]"
            ".dispatchEvent(new PointerEvent(arguments[1], {bubbles: true}))", i, event,
        )  # fmt: skip
        return self.said("token")

    def said(self, name: str) -> str:
        return str(self.run("return document.getElementById(arguments[0]).textContent", name))

    def listed(self, name: str) -> list[tuple[int, str]]:
        """Positions and shares of a list."""
        found = self.run(
            "return [...document.querySelectorAll(`#${arguments[0]} li`)]"
            ".map((l) => [l.lastChild.textContent, l.firstChild.textContent])", name,
        )  # fmt: skip
        return [(int(pos.replace(",", "")), share) for pos, share in found]


Open = Callable[[Explanation], Page]


@pytest.fixture
def page(chromium: Any, tmp_path: Path) -> Open:
    def load(e: Explanation) -> Page:
        e.write(tmp_path / "why.html")
        chromium.get_log("browser")
        chromium.get((tmp_path / "why.html").as_uri())
        end = time.monotonic() + 60
        while not chromium.execute_script("return 'ready' in document.documentElement.dataset"):
            assert time.monotonic() < end, chromium.get_log("browser")
            time.sleep(0.02)
        return Page(chromium)

    yield load
    assert chromium.get_log("browser") == []  # neither errors nor refusals


def expected(e: Explanation, n_read: int, row: int | None = None, head: int | None = None) -> list[float]:
    """Shares from the plain definition: of the chosen layers and heads, those that have not lost it."""
    part = e.left[slice(None) if row is None else [row]][:, slice(None) if head is None else [head]]
    shares = [float(np.mean(part[..., p] > n_read)) if p < n_read else 0.0 for p in range(e.n_past)]
    return [*shares, *[0.0] * (len(e.texts) - e.n_past)]


def test_shades_over_time_are_the_shares_of_layers_and_heads_that_hold_a_token(page: Open) -> None:
    e = explanation(WORDS)
    shown = page(e)
    assert shown.shares() == pytest.approx(expected(e, e.n_past), abs=1e-3)
    for n_read in (0, 1, 100, 111, 112, 113, 318):
        shown.set("time", n_read)
        assert shown.shares() == pytest.approx(expected(e, n_read), abs=1e-3)
        assert shown.shares() == pytest.approx([*e.held(n_read) / 6, 0], abs=1e-3)
        assert shown.marked("unread") == list(range(n_read, 320))
        assert shown.marked("gone") == [p for p in range(n_read) if not e.held(n_read)[p]]
    assert len(shown.marked("gone")) > 0


def test_a_layer_and_a_head_are_shown_on_their_own(page: Open) -> None:
    e = explanation(WORDS)
    shown = page(e)
    for row, head in ((0, None), (None, 1), (2, 0)):
        shown.set("layer", "all" if row is None else row)
        shown.set("head", "all" if head is None else head)
        for n_read in (200, 319):
            shown.set("time", n_read)
            assert shown.shares() == pytest.approx(expected(e, n_read, row, head), abs=1e-3)
    assert shown.marked("heavy") == np.flatnonzero(e.heavy[2, 0]).tolist()
    names = shown.run("return [...document.querySelectorAll('#layer option')].map((o) => o.text)")
    assert names == ["all", "1", "3", "5"]


def test_buttons_go_from_eviction_to_eviction(page: Open) -> None:
    e = explanation(WORDS)
    shown = page(e)
    events = np.unique(e.left[e.left != HELD]).tolist()
    shown.set("time", events[3] - 1)
    for button, wanted in (("later", 3), ("later", 4), ("earlier", 3), ("earlier", 2)):
        shown.run("document.getElementById(arguments[0]).click()", button)
        assert shown.run("return Number(document.getElementById('time').value)") == events[wanted]


def test_a_token_says_where_it_is_held_and_when_it_left(page: Open) -> None:
    e = explanation(WORDS)
    shown = page(e)
    shown.set("time", 250)
    for p in (2, 7, 60, 130):
        text = shown.token(p, "pointerover")
        assert WORDS[p].replace("\n", "⏎") in text and f"position {p}," in text
        assert f"held in {e.held(250)[p]} of 6" in text
        assert ("sink" in text, "pinned" in text) == (p < 4, 6 <= p < 9)
        cells = shown.run(
            "return [...document.querySelectorAll('#grid td')].map((c) => [c.className, c.title])"
        )
        for (name, title), left in zip(cells, e.left[..., p].ravel().tolist(), strict=True):
            assert (name == "held") == (left > 250)
            assert title.endswith("held to the end" if left == HELD else f"left after {left} tokens")
        assert cells[5][1].startswith("layer 5, KV head 1:")
    assert "recent at the end" in shown.token(312)
    assert "not read yet" in shown.token(319) and "answer" in shown.token(319)
    assert shown.token(3, "pointerover") == shown.token(319)  # a click keeps it


def test_recalled_tokens_are_marked_over_time(page: Open) -> None:
    left = explanation(WORDS).left
    e = explanation(WORDS, gaps=gaps_of(left))
    shown = page(e)
    n_marked = 0
    for n_read in (40, 160, 250, 319):
        shown.set("time", n_read)
        assert shown.shares() == pytest.approx([*e.held(n_read) / 6, 0], abs=1e-3)
        counts = e.recalled(n_read)
        marked = np.flatnonzero(counts >= 1).tolist()  # a tenth of six is less than one
        assert shown.marked("recalled") == marked
        titles = shown.run("return [...document.querySelectorAll('#text .recalled')].map((t) => t.title)")
        assert titles == [f"recalled in {counts[p]} of 6" for p in marked]
        n_marked += len(marked)
    assert n_marked > 20
    p = int(counts.argmax())
    assert f"recalled in {counts[p]}" in shown.token(p)
    row, head, _, gone, back = next(gap for gap in e.gaps.tolist() if gap[2] == p)
    title = shown.run("return document.querySelectorAll('#grid td')[arguments[0]].title", 2 * row + head)
    assert f"left after {gone} and came back after {back} tokens, " in title
    shown.set("layer", 1)
    shown.set("head", 0)
    back_there = {gap[2] for gap in e.gaps.tolist() if gap[:2] == [1, 0] and gap[4] <= 319}
    assert set(shown.marked("recalled")) == {q for q in back_there if e.left[1, 0, q] == HELD}
    assert "from the attic" in shown.run("return document.querySelector('#legend .recalled').title")
    assert f", {len(np.unique(e.gaps[:, 4]))} recalls" in shown.said("facts")


def test_where_nothing_came_back_nothing_is_said_of_it(page: Open) -> None:
    shown = page(explanation(WORDS))
    assert not shown.marked("recalled") and "recall" not in shown.said("rules") + shown.said("facts")


def test_a_token_of_the_answer_shows_what_it_looked_at_and_what_it_missed(page: Open) -> None:
    e = explanation(WORDS)
    shown = page(e)
    assert e.missed is not None

    def assert_lists(kept: Any, missed: Any) -> None:
        for name, row in (("kept", kept), ("missed", missed)):
            listed = shown.listed(name)
            wanted = sorted(range(e.n_past), key=lambda p: -row[p])[:N_LISTED]
            assert [p for p, _ in listed] == wanted == sorted(wanted, key=lambda p: -row[p])
            assert [float(share.split()[0]) for _, share in listed] == pytest.approx(
                [100 * float(row[p]) for p in wanted], abs=0.006
            )
            assert shown.marked(name) == sorted(wanted)
        assert shown.said("total").startswith(f"{100 * float(missed.sum()):.1f} %")

    assert e.missed_by_head is not None
    assert_lists(e.kept_by_head.mean((0, 1)), e.missed_by_head.mean((0, 1)))
    shown.set("head", 1)
    assert_lists(e.kept_by_head[:, 1].mean(0), e.missed_by_head[:, 1].mean(0))
    shown.set("layer", 2)
    assert_lists(e.kept_by_head[2, 1], e.missed_by_head[2, 1])
    shown.token(e.n_prompt + 1)
    assert_lists(e.kept[1], e.missed[1])
    shown.set("answer", 4)
    assert_lists(e.kept[3], e.missed[3])
    shown.run("document.querySelector('#missed li').click()")
    assert shown.marked("chosen") == [int(e.missed[3].argmax())]


def test_what_is_not_known_is_said(page: Open) -> None:
    shown = page(explanation(WORDS, missed=None, why_not_missed="the model is too small", has_scores=False))
    assert "Not known: the model is too small." in shown.said("total") and not shown.listed("missed")
    assert "no heavy hitters" in shown.said("rules") and not shown.marked("heavy")


NASTY = [
    "<b>", "</script>", "<script>document.title='bad'</script>", "<!--", "]]>", "&amp;", '"', "'", "\\u003c",
    "\t", "x\ty", "\n\n", "", "", "", "😀", " שלום", " عالم", "\u202e", "\u2028", "\0", "\x1b[31m", "`${1}`",
    "<img src=x onerror=document.title='bad'>", "{{ 7*7 }}", "{% raw %}", "\r\n", "\ufeff", "end\n",
]  # fmt: skip


def test_a_text_is_shown_as_it_is_and_does_nothing(page: Open) -> None:
    shown = page(explanation(NASTY * 4, model="</title><script>document.title='bad'</script>"))
    assert (
        shown.run("return [...document.querySelectorAll('#text .t')].map((t) => t.textContent)") == NASTY * 4
    )
    assert shown.driver.title == "</title><script>document.title='bad'</script>: why it was forgotten"
    assert shown.run("return document.querySelectorAll('script').length") == 2
    assert shown.run("return document.querySelectorAll('#text img, #text b').length") == 0
    for i in range(len(NASTY)):
        shown.token(i)
    shown.token(len(NASTY) * 4 - 1)
    assert shown.run("return document.querySelectorAll('aside img, aside script').length") == 0


def test_lines_from_right_to_left_begin_at_the_right(page: Open) -> None:
    shown = page(explanation(["one", " two", "\n", "שלום", " עולם", "\n", "three", " four"]))
    boxes = shown.run(
        "return [...document.querySelectorAll('#text .t')].map((t) => t.getBoundingClientRect().left)"
    )
    assert boxes[0] < boxes[1] and boxes[3] > boxes[4] and boxes[6] < boxes[7]
    assert boxes[3] > boxes[7] + 100  # at the other edge


def texts_of(n: int) -> Sequence[str]:
    return [f" word{i}" + ("\n" if i % 20 == 19 else "") for i in range(n)]


def test_ten_thousand_tokens_are_one_element_each_in_blocks(page: Open) -> None:
    e = explanation(texts_of(10_000), n_answer=50)
    shown = page(e)
    n_nodes = shown.run("return document.getElementsByTagName('*').length")
    assert 10_000 < n_nodes < 10_800
    assert shown.run("return document.querySelectorAll('#text .block').length") > 50
    for n_read in (9_999, 5_000, 17):
        shown.set("time", n_read)
        assert shown.shares() == pytest.approx([*e.held(n_read) / 6, 0], abs=1e-3)


def test_a_line_without_end_is_broken_with_a_mark(page: Open) -> None:
    texts = ["word", *[f" word{i}" for i in range(2_499)]]
    shown = page(explanation(texts))
    blocks = shown.run(
        "return [...document.querySelectorAll('#text .block')].map((b) => [b.textContent, b.className])"
    )
    assert "".join(text for text, _ in blocks) == "".join(texts)
    assert [name for _, name in blocks] == ["block goes-on", "block goes-on", "block"]


def test_a_page_of_ten_thousand_tokens_and_ninety_heads_stays_small(tmp_path: Path) -> None:
    """Each entry has its event; 150 of them take 7.2 bits, and four characters hold three bytes."""
    e = explanation(texts_of(10_000), n_answer=100)
    rng = np.random.default_rng(1)
    left = 64 * rng.integers(0, 150, (30, 3, e.n_past), dtype=np.int32)
    large = replace(
        e, left=left, heavy=rng.random(left.shape) < 0.02, layer_ids=tuple(range(30)),
        kept_by_head=rng.random(left.shape, np.float32), missed_by_head=rng.random(left.shape, np.float32),
    )  # fmt: skip
    n_bits = left.size * (np.log2(150) + 0.15)  # 0.15 for the heavy hitters' 2 %
    assert len(large.html().encode()) < 1.3 * n_bits / 8 * 4 / 3 + 1_000_000

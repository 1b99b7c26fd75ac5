"""Refuses grammars that llama.cpp's parser would hang or crash on, before it sees them.

Its parser takes every grammar for a sane one: it counts up to a repetition's end from above, recurses once
per bracket, and expands what a rule can begin with without a limit. Here the rules are built as it builds
them (llama-grammar.cpp), and these three are bounded. What is merely wrong is left to its own words.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Set
from graphlib import CycleError, TopologicalSorter
from typing import TypeAlias

from h2o_gguf.errors import OptionError

__all__ = ["MAX_DEPTH", "MAX_TIMES", "check_grammar"]

MAX_TIMES = 2000  # llama.cpp's; a larger upper limit would count as none
MAX_DEPTH = 1000  # brackets; a thread's stack of 512 KiB holds them
MAX_SYMBOLS = 1_000_000
MAX_CALLS = 1_000_000  # of its check for left recursion, which visits a rule once per way to get there
MAX_CHAIN = 3000  # and recurses
MAX_WAYS = 20_000  # it compares each with all others
MAX_STEPS = 2_000_000

Name: TypeAlias = str | int  # of a rule; numbers are those of groups and repetitions
Alternates: TypeAlias = list[list[Name | None]]  # None: a character or a token
Position: TypeAlias = tuple[Name, int, int]  # rule, alternate, symbol

SPACE = r"(?:[ \t\r\n]|\#[^\r\n]*(?:[\r\n]|\Z))*"  # a comment ends at one place, or matching would be slow
TOKEN = re.compile(
    rf"""{SPACE}(?:
        (?P<define>[A-Za-z0-9-]+){SPACE}::=
      | (?P<name>[A-Za-z0-9-]+)
      | "(?P<text>[^"\\]*(?:\\.[^"\\]*)*)"
      | \[\^?(?P<set>[^\]\\]*(?:\\.[^\]\\]*)*)\]
      | (?P<any>\.|!?<[^>]*>)
      | (?P<mark>[()|])
      | (?P<sign>[*+?])
      | \{{{SPACE}(?P<low>[0-9]+){SPACE}(?P<comma>,{SPACE}(?P<high>[0-9]*){SPACE})?\}}
    )""",
    re.VERBOSE | re.DOTALL,
)
SIGNS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}


@functools.lru_cache(maxsize=16)
def check_grammar(text: str) -> None:
    """Raise OptionError if llama.cpp's parser would hang or crash on this GBNF text."""
    if "\0" in text:
        raise _refusal(f"it has a NUL character at {text.index(chr(0))}, and would end there: take it out")
    rules = _Reader().read(text)
    _check_left_recursion(rules)
    _check_beginnings(rules)


class _Reader:
    """Builds the rules that llama.cpp would."""

    def __init__(self) -> None:
        self.rules: dict[Name, Alternates] = {}
        self.n_symbols = 0

    def read(self, text: str) -> dict[Name, Alternates]:
        """The rules up to the first mistake, where llama.cpp stops too."""
        alternates: Alternates = [[]]
        item = 0  # where the last item of the sequence begins
        outside: list[Alternates] = []  # the groups around it
        at = 0
        while token := TOKEN.match(text, at):
            at = token.end()
            sequence = alternates[-1]
            kind, mark = token.lastgroup, token["mark"]
            if token["define"]:
                if outside:
                    break
                alternates, item = self._rule(token["define"]), 0
            elif mark == "|":
                alternates.append([])
                item = 0
            elif mark == "(":
                if len(outside) == MAX_DEPTH:
                    raise _refusal(f"its brackets are nested more than {MAX_DEPTH} deep: name inner parts")
                outside.append(alternates)
                group = len(self.rules)
                sequence.append(group)
                alternates, item = self._rule(group), 0
            elif mark == ")":
                if not outside:
                    break
                alternates = outside.pop()
                item = len(alternates[-1]) - 1
            elif token["sign"] or token["low"]:
                low, high = self._times(token)
                if item == len(sequence):
                    break
                self._repeat(sequence, item, low, high)
            else:
                item = len(sequence)
                n = len(token[kind]) if kind in ("text", "set") else 1
                self._count(n)
                sequence += [token["name"]] if token["name"] else [None] * n
        return self.rules

    def _rule(self, name: Name) -> Alternates:
        self.rules[name] = [[]]
        return self.rules[name]

    def _count(self, n: int) -> None:
        self.n_symbols += n
        if self.n_symbols > MAX_SYMBOLS:
            raise _refusal(
                f"written out it has more than {MAX_SYMBOLS} characters: repeat less, or shorter texts"
            )

    @staticmethod
    def _times(token: re.Match[str]) -> tuple[int, int | None]:
        if token["sign"]:
            return SIGNS[token["sign"]]
        low = _number(token["low"])
        high = low if token["comma"] is None else _number(token["high"]) if token["high"] else None
        written = token[0].strip()
        if high is not None and high < low:
            raise _refusal(f"the repetition {written} ends below its start: swap the numbers")
        if max(low, high or 0) > MAX_TIMES:
            raise _refusal(f"the repetition {written} is too long: a number can be at most {MAX_TIMES}")
        return low, high

    def _repeat(self, sequence: list[Name | None], item: int, low: int, high: int | None) -> None:
        """Write out item{low,high}: copies, then a rule for each one that may be missing."""
        once = sequence[item:]
        n_optional = 1 if high is None else high - low
        self._count((len(once) + 1) * (low + n_optional))
        if low == 0:
            del sequence[item:]
        sequence += once * (low - 1)
        rest: list[Name | None] = []
        for _ in range(n_optional):
            name = len(self.rules)
            self.rules[name] = [[*once, *([name] if high is None else rest)], []]
            rest = [name]
        sequence += rest


def _number(digits: str) -> int:
    return int(digits.lstrip("0")[:9] or "0")  # nine digits are too many in any case


def _check_left_recursion(rules: Mapping[Name, Alternates]) -> None:
    """Refuse what llama.cpp's own check would refuse, or not come to an end of."""
    # It takes a rule for one that may be empty only if one of its alternates has no symbols.
    empty = {name for name, alternates in rules.items() if [] in alternates}
    left = {name: _leftmost(alternates, empty) for name, alternates in rules.items()}
    calls: dict[Name, int] = {}
    chain: dict[Name, int] = {}
    try:
        for name in TopologicalSorter(left).static_order():
            nexts = left.get(name, [])
            calls[name] = 1 + sum(calls[other] for other in nexts)
            chain[name] = 1 + max((chain[other] for other in nexts), default=0)
            if calls[name] > MAX_CALLS or chain[name] > MAX_CHAIN:
                raise _too_many_ways(name)
    except CycleError as error:
        names = [repr(name) for name in error.args[1] if isinstance(name, str)]
        what = (
            f"rule {names[0]} can begin with itself" if names else "something that may be empty is repeated"
        )
        raise _refusal(f"{what} (left recursion): let every repetition begin with a character") from None


def _leftmost(alternates: Alternates, empty: Set[Name]) -> list[Name]:
    """The rules these can begin with, where some may be empty."""
    found: list[Name] = []
    for sequence in alternates:
        for symbol in sequence:
            if symbol is None:
                break
            found.append(symbol)
            if symbol not in empty:
                break
    return found


def _check_beginnings(rules: Mapping[Name, Alternates]) -> None:
    """Refuse rules that can begin in too many ways, or in endlessly many: a rule may come back to its start
    after parts that turn out empty, with ever more behind it.
    """
    n_steps = 0
    for name in rules:
        n_steps += _count_beginnings(rules, name)
        if n_steps > MAX_STEPS:
            raise _too_many_ways(name)


def _count_beginnings(rules: Mapping[Name, Alternates], name: Name) -> int:
    """How many steps it takes to expand the stacks of positions a rule begins with, as llama.cpp does it at
    the start and after each character.
    """
    stacks: list[tuple[Position, int]] = [(("", 0, 0), 0)]  # a position and the stack below; 0 is empty
    ids: dict[tuple[Position, int], int] = {}

    def push(position: Position, below: int) -> int:
        if (position, below) not in ids:
            ids[position, below] = len(stacks)
            stacks.append((position, below))
        return ids[position, below]

    todo = [push((name, i, 0), 0) for i, sequence in enumerate(rules[name]) if sequence]
    seen = {0, *todo}
    n_steps = 0
    while todo:
        (rule, i, at), below = stacks[todo.pop()]
        sequence = rules[rule][i]
        symbol = sequence[at]
        if symbol is None:
            continue
        behind = push((rule, i, at + 1), below) if at + 1 < len(sequence) else below
        for j, beginning in enumerate(rules.get(symbol, [])):
            stack = push((symbol, j, 0), behind) if beginning else behind
            if stack not in seen:
                seen.add(stack)
                todo.append(stack)
            n_steps += 1
        if len(seen) > MAX_WAYS:
            raise _too_many_ways(name)
    return n_steps


def _too_many_ways(name: Name) -> OptionError:
    what = f"rule {name!r}" if isinstance(name, str) else "a part of it in brackets, or repeated,"
    return _refusal(
        f"{what} can begin in too many ways (or with itself, after parts that may be empty): "
        "let its alternatives begin with different characters"
    )


def _refusal(words: str) -> OptionError:
    return OptionError(f"the grammar cannot be used: {words}", "grammar")

"""Needles in a haystack.  Source: RULER, arXiv 2404.06654."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial

from h2o_gguf.evaluation.haystack import Haystack, hide
from h2o_gguf.evaluation.sample import Build, Check, Sample
from h2o_gguf.evaluation.words import keys, number, uuid4

__all__ = ["grid", "multikey", "multiquery", "multivalue", "rivals", "single"]

Value = Callable[[random.Random], str]
DEPTHS = 40  # as many places a needle can have


def single(rng: random.Random, haystack: Haystack, *, has_noise: bool, depth: float | None = None) -> Build:
    """One needle, in noise or in prose.  depth : 0 to 1, None: drawn."""
    (key,), value = keys(rng, 1), number(rng)
    start = rng.randrange(1 << 20)
    place = _depths(rng, 1) if depth is None else [depth]
    needles = [_needle("number", key, value)]

    def build(n: int) -> Sample:
        units, glue = _hay(haystack, n, start, has_noise)
        return _sample("number", [key], [value], hide(units, needles, place), glue)

    return build


grid = partial(single, has_noise=False)


def rivals(
    rng: random.Random, haystack: Haystack, *, depths: Sequence[float], asked: int, has_noise: bool = False
) -> Build:
    """A needle at each depth, 0 to 1, one of which is asked for; the text is the same whichever it is.

    has_noise : they lie in noise, else in prose.
    """
    names, values = keys(rng, len(depths)), [number(rng) for _ in depths]
    needles = [_needle("number", key, value) for key, value in zip(names, values, strict=True)]
    start = rng.randrange(1 << 20)

    def build(n: int) -> Sample:
        units, glue = _hay(haystack, n, start, has_noise)
        return _sample("number", [names[asked]], [values[asked]], hide(units, needles, depths), glue)

    return build


def multikey(rng: random.Random, haystack: Haystack, *, kind: str = "number") -> Build:
    """A haystack of needles; one key is asked for."""
    make: Value = uuid4 if kind == "uuid" else number
    (key,), value = keys(rng, 1), make(rng)
    place, seed = _depths(rng, 1), rng.getrandbits(32)

    def build(n: int) -> Sample:
        names, values = random.Random(seed), random.Random(seed + 1)
        lines = [_needle(kind, other, make(values)) for other in keys(names, n + 1) if other != key][:n]
        return _sample(kind, [key], [value], hide(lines, [_needle(kind, key, value)], place), "\n")

    return build


def multivalue(rng: random.Random, haystack: Haystack, *, n_values: int = 4) -> Build:
    """One key with several values, all asked for."""
    (key,) = keys(rng, 1)
    return _in_prose(rng, haystack, [key] * n_values)


def multiquery(rng: random.Random, haystack: Haystack, *, n_keys: int = 4) -> Build:
    """Several keys, all asked for."""
    return _in_prose(rng, haystack, keys(rng, n_keys))


def _in_prose(rng: random.Random, haystack: Haystack, names: Sequence[str]) -> Build:
    values = [number(rng) for _ in names]
    needles = [_needle("number", key, value) for key, value in zip(names, values, strict=True)]
    start, places = rng.randrange(1 << 20), _depths(rng, len(names))

    def build(n: int) -> Sample:
        units = hide(haystack.sentences(n, start), needles, places)
        return _sample("number", list(dict.fromkeys(names)), values, units, " ")

    return build


def _hay(haystack: Haystack, n: int, start: int, has_noise: bool) -> tuple[list[str], str]:
    """n units of a text, and what stands between them."""
    return (haystack.noise(n), "\n") if has_noise else (haystack.sentences(n, start), " ")


def _depths(rng: random.Random, n: int) -> list[float]:
    return [place / (DEPTHS - 1) for place in rng.sample(range(DEPTHS), n)]


def _needle(kind: str, key: str, value: str) -> str:
    return f"One of the special magic {kind}s for {key} is: {value}."


def _sample(
    kind: str, asked: Sequence[str], values: Sequence[str], units: Sequence[str], glue: str
) -> Sample:
    names = asked[0] if len(asked) == 1 else f"{', '.join(asked[:-1])}, and {asked[-1]}"
    is_one = len(values) == 1
    what, verb = (f"special magic {kind}", "is") if is_one else (f"special magic {kind}s", "are")
    hidden = f"A {what} is hidden" if is_one else f"Some {what} are hidden"
    return Sample(
        context=f"{hidden} within the following text. Make sure to memorize it. "
        f"I will quiz you about the {kind}{'' if is_one else 's'} afterwards.\n{glue.join(units)}",
        question=f"What {verb} {'the' if is_one else 'all the'} {what} for {names} "
        "mentioned in the provided text?",
        prefix=f"The {what} for {names} mentioned in the provided text {verb}",
        checks=tuple(Check(value) for value in values),
    )

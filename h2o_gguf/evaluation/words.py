"""Keys and values of needles, and words that are easily told apart."""

from __future__ import annotations

import random
import uuid
from functools import lru_cache

from wonderwords import RandomWord

__all__ = ["coded_words", "keys", "number", "uuid4", "variables", "words"]

LETTERS = "abcdefghijklmnopqrstuvwxyz"


@lru_cache(maxsize=8)
def _words(kind: str) -> tuple[str, ...]:
    """All words of a part of speech, sorted: no spaces, no hyphens."""
    found = RandomWord().filter(include_parts_of_speech=[kind], regex="[a-z]{3,12}")
    return tuple(sorted(set(found)))


@lru_cache(maxsize=1)
def _unlike() -> tuple[str, ...]:
    """The words that have no other word in them."""
    pool = {*_words("nouns"), *_words("adjectives")}
    return tuple(
        word
        for word in sorted(pool)
        if not any(word[i:j] in pool for i in range(len(word)) for j in range(i + 3, len(word) + (i > 0)))
    )


def keys(rng: random.Random, n: int) -> list[str]:
    """n different keys, adjective-noun."""
    found: dict[str, None] = {}
    while len(found) < n:
        found[f"{rng.choice(_words('adjectives'))}-{rng.choice(_words('nouns'))}"] = None
    return list(found)


def words(rng: random.Random, n: int) -> list[str]:
    """n different nouns and adjectives; no one is a part of another."""
    return rng.sample(_unlike(), n)


def number(rng: random.Random) -> str:
    """Seven digits."""
    return str(rng.randint(1_000_000, 9_999_999))


def uuid4(rng: random.Random) -> str:
    """A random UUID."""
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def variables(rng: random.Random, n: int) -> list[str]:
    """n different names of five capitals."""
    return [word.upper() for word in _letters(rng, n, 5)]


def coded_words(rng: random.Random, n: int) -> list[str]:
    """n different words of six random letters."""
    return _letters(rng, n, 6)


def _letters(rng: random.Random, n: int, length: int) -> list[str]:
    found: dict[str, None] = {}
    while len(found) < n:
        found["".join(rng.choices(LETTERS, k=length))] = None
    return list(found)

"""The texts that needles are hidden in, in units that fill a length."""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["NOISE", "Haystack", "hide"]

# Source: RULER, arXiv 2404.06654.
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


class Haystack:
    """Sentences of a text, which is not empty, and noise."""

    def __init__(self, text: str) -> None:
        self._sentences = [part for part in re.split(r"(?<=[.!?])\s+", " ".join(text.split())) if part]

    def noise(self, n: int) -> list[str]:
        """n units of noise."""
        return [NOISE] * n

    def sentences(self, n: int, start: int = 0) -> list[str]:
        """n sentences from number start on; after the last comes the first again."""
        size = len(self._sentences)
        return [self._sentences[(start + i) % size] for i in range(n)]


def hide(units: Sequence[str], needles: Sequence[str], depths: Sequence[float]) -> list[str]:
    """The units with each needle at its depth: 0 before the first, 1 behind the last."""
    found = list(units)
    places = sorted(zip((round(depth * len(units)) for depth in depths), needles, strict=True), reverse=True)
    for place, needle in places:
        found.insert(place, needle)
    return found

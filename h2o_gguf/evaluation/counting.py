"""Words that are frequent all over the text.  Source: RULER, arXiv 2404.06654."""

from __future__ import annotations

import math
import random

from h2o_gguf.evaluation.haystack import Haystack
from h2o_gguf.evaluation.sample import Build, Check, Sample
from h2o_gguf.evaluation.words import coded_words, words

__all__ = ["common_words", "frequent_words"]

N_COMMON = 10
ZETA_2 = math.pi**2 / 6  # the sum of all r^-2
N_RANKS = 200


def common_words(rng: random.Random, haystack: Haystack, *, n_times: int = 30, n_others: int = 3) -> Build:
    """Ten words n_times each among others n_others each, shuffled and numbered; the ten are asked for."""
    pool = words(rng, 2000)
    seed = rng.getrandbits(32)

    def build(n: int) -> Sample:
        listed = (
            pool[:N_COMMON] * n_times
            + [pool[N_COMMON + i % (len(pool) - N_COMMON)] for i in range(n)] * n_others
        )
        random.Random(seed).shuffle(listed)
        return Sample(
            context="Below is a numbered list of words. In these words, some appear more often than others. "
            "Memorize the ones that appear most often.\n"
            + " ".join(f"{i}. {word}" for i, word in enumerate(listed, 1)),
            question=f"Question: What are the {N_COMMON} most common words in the above list?",
            prefix=f"Answer: The top {N_COMMON} words that appear most often in the list are:",
            checks=tuple(Check(word) for word in pool[:N_COMMON]),
        )

    return build


def frequent_words(rng: random.Random, haystack: Haystack) -> Build:
    """Coded words, the r-th as often as r^-2; ranks 2 to 4 are asked for, the first is dots."""
    ranked = ["...", *coded_words(rng, N_RANKS - 1)]
    seed = rng.getrandbits(32)

    def build(n: int) -> Sample:
        said = [word for r, word in enumerate(ranked, 1) for _ in range(_times(n, r))]
        random.Random(seed).shuffle(said)
        return Sample(
            context="Read the following coded text and track the frequency of each coded word. Find the "
            f"three most frequently appeared coded words. {' '.join(said)}",
            question="Question: Do not provide any explanation. Please ignore the dots '...'. What are the "
            "three most frequently appeared words in the above coded text?",
            prefix="Answer: According to the coded text above, the three most frequently appeared words are:",
            checks=tuple(Check(word) for word in ranked[1:4]),
        )

    return build


def _times(n: int, rank: int) -> int:
    """Of n words; ranks 2 to 4 differ by one or more, whatever n."""
    return max(round(n / ZETA_2 / rank**2), 5 - rank)

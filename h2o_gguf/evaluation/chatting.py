"""A fact told early in a chat, and asked for at its end: memory over many turns."""

from __future__ import annotations

import random

from h2o_gguf.evaluation.haystack import Haystack
from h2o_gguf.evaluation.sample import Build, Check, Sample
from h2o_gguf.evaluation.words import keys, number, words

__all__ = ["fact_told"]

SAID = (
    "Give me a word that goes well with {}.",
    "Today I thought about {}.",
    "Do you like the sound of {}?",
    "I wrote {} on a piece of paper.",
    "Somebody at work said {} all the time.",
    "How would you explain {} to a child?",
    "I keep forgetting how to spell {}.",
)
ANSWERED = (
    "I would take {}.",
    "That is a nice thought. It makes me think of {}.",
    "I do, nearly as much as {}.",
    "Then write {} below it.",
    "Tell them about {} instead.",
)
N_WORDS = 2000


def fact_told(rng: random.Random, haystack: Haystack) -> Build:
    """A number told in the second turn of a chat, small talk, and the question in the last.  Source: ours."""
    (key,), value = keys(rng, 1), number(rng)
    pool = words(rng, N_WORDS)

    def talk(i: int) -> tuple[tuple[str, str], tuple[str, str]]:
        said, answered = (pool[(2 * i + j) % N_WORDS] for j in range(2))
        return (
            ("user", SAID[i % len(SAID)].format(said)),
            ("assistant", ANSWERED[i % len(ANSWERED)].format(answered)),
        )

    def build(n: int) -> Sample:
        fact = ("user", f"Remember this: the secret code for {key} is: {value}."), ("assistant", "I will.")
        turns = [talk(0), fact, *(talk(i) for i in range(1, n + 1))]
        return Sample(
            context="",
            question=f"What is the secret code for {key} that I told you to remember?",
            prefix=f"The secret code for {key} that you told me to remember is:",
            checks=(Check(value),),
            history=tuple(message for turn in turns for message in turn),
        )

    return build

"""Rules in the system prompt, then a long chat: the field's silent failure (arXiv 2510.00231)."""

from __future__ import annotations

import random

from h2o_gguf.evaluation.haystack import Haystack
from h2o_gguf.evaluation.sample import Build, Check, Sample
from h2o_gguf.evaluation.words import keys, number, words

__all__ = ["rules_kept"]

N_SENTENCES = 3  # of a turn


def rules_kept(rng: random.Random, haystack: Haystack, *, pins_system: bool = False) -> Build:
    """Four checkable rules for a sign-off that nobody asks for until the end of the chat.  Source: ours.

    No reply on the way follows them, so that nothing but the system prompt says what they are.
    """
    first, last = (word.upper() for word in words(rng, 2))
    (name,), code = keys(rng, 1), number(rng)
    start = rng.randrange(1 << 20)
    system = (
        "You are a helpful assistant. When the user asks for the sign-off, follow all of these rules:\n"
        f"1. Begin your reply with the word {first}.\n2. Mention the ship {name}.\n"
        f"3. Give the number {code}.\n4. End your reply with the word {last}."
    )

    def build(n: int) -> Sample:
        turns = [
            (role, text)
            for i in range(n)
            for role, text in (
                ("user", f"Note this: {' '.join(haystack.sentences(N_SENTENCES, start + N_SENTENCES * i))}"),
                ("assistant", "Noted."),
            )
        ]
        return Sample(
            context="",
            question="That was all. Now give me the sign-off, by all the rules.",
            prefix="",
            checks=(Check(first, "start"), Check(name), Check(code), Check(last, "end")),
            history=(("system", system), *turns),
            pins_system=pins_system,
        )

    return build

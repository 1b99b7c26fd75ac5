"""Something that changes along the text: variables, and a stack."""

from __future__ import annotations

import random
from itertools import pairwise

from h2o_gguf.evaluation.haystack import Haystack
from h2o_gguf.evaluation.sample import Build, Check, Sample
from h2o_gguf.evaluation.words import keys, variables

__all__ = ["open_folders", "variable_chain"]

N_HOPS = 4
STACK_MIN, STACK_MAX = 3, 5


def variable_chain(rng: random.Random, haystack: Haystack) -> Build:
    """A chain of five variables in noise; all names with its value are asked for.

    Source: RULER, arXiv 2404.06654.
    """
    names, value = variables(rng, N_HOPS + 1), str(rng.randint(10_000, 99_999))
    said = [
        f"VAR {names[0]} = {value}",
        *(f"VAR {b} = VAR {a}" for a, b in pairwise(names)),
    ]
    places = sorted(rng.random() for _ in said)

    def build(n: int) -> Sample:
        # From the last on, so that several at one place keep their order.
        units = haystack.noise(n)
        for line, depth in reversed(list(zip(said, places, strict=True))):
            units.insert(round(depth * n), line)
        return Sample(
            context="Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
            + "\n".join(units),
            question=f"Question: Find all variables that are assigned the value {value} in the text above.",
            prefix="Answer: According to the chain(s) of variable assignment in the text above, "
            f"{len(names)} variables are assigned the value {value}, they are:",
            checks=tuple(Check(name) for name in names),
        )

    return build


def open_folders(rng: random.Random, haystack: Haystack) -> Build:
    """A random tree walked depth-first; the stack at the end is asked for.  Source: ours."""
    seed = rng.getrandbits(32)

    def build(n: int) -> Sample:
        walk = random.Random(seed)
        names = iter(keys(random.Random(seed + 1), n + STACK_MIN))
        stack: list[str] = []
        lines: list[str] = []
        while len(lines) < n or len(stack) < STACK_MIN:
            deeper = len(lines) >= n or len(stack) < 1 or (len(stack) < STACK_MAX and walk.random() < 0.5)
            if deeper:
                stack.append(next(names))
                lines.append(f"Opened the folder {stack[-1]}.")
            else:
                lines.append(f"Closed the folder {stack.pop()}.")
        return Sample(
            context="This is a log of folders that were opened and closed. Keep track of which are open.\n"
            + "\n".join(lines),
            question="Question: Which folders are still open at the end of the log?",
            prefix="Answer: From the first opened to the last opened, the folders that are still open are:",
            checks=tuple(Check(name) for name in stack),
        )

    return build

"""One question about one long text, and whether an answer is right."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

from h2o_gguf.errors import OptionError

__all__ = ["Build", "Check", "Sample", "fit", "score"]

Where = Literal["anywhere", "start", "end"]


@dataclass(frozen=True)
class Check:
    """A string an answer must have.  where : "start" and "end" do not count spaces and full stops."""

    text: str
    where: Where = "anywhere"

    def holds(self, answer: str) -> bool:
        """Whether the answer has it, case aside."""
        answer, text = answer.casefold().strip(" \n.\"'*"), self.text.casefold()
        if self.where == "anywhere":
            return text in answer
        return answer.startswith(text) if self.where == "start" else answer.endswith(text)


@dataclass(frozen=True)
class Sample:
    """What the model reads and what it should say.

    context : what comes before the question, in the same message. history : (role, text) of the messages
    before. prefix : the first words of the reply, given. checks : what the rest of it must have.
    pins_system : the first message is never evicted, as far as there is room.
    """

    context: str
    question: str
    prefix: str
    checks: tuple[Check, ...]
    history: tuple[tuple[str, str], ...] = ()
    pins_system: bool = False

    @property
    def can_stop_early(self) -> bool:
        """Whether an answer that passes every check stays right, whatever follows."""
        return all(check.where != "end" for check in self.checks)


T = TypeVar("T")
Build = Callable[[int], Sample]  # from the number of filler units; the same units each time


def score(sample: Sample, answer: str) -> float:
    """The share of checks that hold, 0 to 1."""
    return sum(check.holds(answer) for check in sample.checks) / len(sample.checks)


def fit(build: Callable[[int], T], count: Callable[[T], int], n_tokens: int, task: str = "the task") -> T:
    """The longest sample of at most n_tokens.

    build : from the number of filler units. count : tokens of what was built, growing with that number.

    Raises: OptionError, no filler at all is too long already.
    """
    if (least := count(build(0))) > n_tokens:
        raise OptionError(
            f"{task} takes {least} tokens without any filler, and {n_tokens} were asked for: "
            f"take a length of {least} or more, or leave the task out",
            "length",
        )
    n = 1
    while count(build(n)) <= n_tokens:
        n *= 2
    return build(bisect_right(range(n // 2, n), n_tokens, key=lambda i: count(build(i))) + n // 2 - 1)

"""A context that is only books, a cache that counts, and engines on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from h2o_gguf.attic import N_QUESTION, AtticOptions, AtticReport
from h2o_gguf.cancel import CancelToken
from h2o_gguf.decoding import DECODE_ABORTED
from h2o_gguf.engine import Engine
from h2o_gguf.errors import OptionError
from h2o_gguf.policies import make
from h2o_gguf.rows import PLAIN

N_VOCAB = 50
CONTROL = 0


class Vocab:
    """Token i spells one letter; 0 is a control token; 40 + i spells letters i and i + 1."""

    n_tokens = N_VOCAB

    def check(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if not 0 <= token < N_VOCAB:
                raise OptionError(f"token {token}", "prompt")

    def text_piece(self, token: int) -> bytes | None:
        if token == CONTROL:
            return None
        return bytes([64 + token - 40, 65 + token - 40]) if token > 40 else bytes([64 + token])


@dataclass
class FakeContext:
    """Holds what a llama.cpp context would hold; the logits say which tokens it has seen."""

    n_batch: int = 4
    n_cells: int = 1000
    n_ctx_train: int = 1000
    n_swa: int = 0
    removal_is_exact: Callable[[int], bool] = lambda pos: True
    seen: list[int] = field(default_factory=list)
    batches: list[list[int]] = field(default_factory=list)
    codes: list[int] = field(default_factory=list)  # what the next decodes return
    before: Callable[[], None] = lambda: None
    attic: Any = None  # asked by batches for which it is armed
    vocab: Any = field(default_factory=Vocab)

    def decode(self, tokens: Sequence[int], pos: int, *, all_logits: bool, cancel: CancelToken | None) -> int:
        assert len(tokens) <= self.n_batch and pos == len(self.seen)
        self.before()
        if self.attic is not None:
            self.attic.begin(pos)
        code = self.codes.pop(0) if self.codes else 0
        if cancel is not None and cancel.cancelled:
            code = DECODE_ABORTED
        if code == 0:
            self.seen += tokens
            self.batches.append(list(tokens))
        return code

    def logits(self, n_rows: int) -> NDArray[np.float32]:
        rows = np.zeros((n_rows, N_VOCAB), np.float32)
        for i in range(n_rows):
            rows[i, self.expected(self.seen[: len(self.seen) - n_rows + 1 + i])] = 1
        return rows

    @staticmethod
    def expected(tokens: Sequence[int]) -> int:
        return 1 + sum((i + 1) * token for i, token in enumerate(tokens)) % 39

    def n_past(self) -> int:
        return len(self.seen)

    def remove_from(self, pos: int) -> bool:
        if not self.removal_is_exact(pos):
            return False
        del self.seen[pos:]
        return True

    def clear(self) -> None:
        self.seen.clear()

    def save(self) -> bytes:
        return bytes(self.seen)

    def load(self, data: bytes) -> bool:
        self.seen[:] = data
        return True

    def close(self) -> None:
        pass


class FakeCache:
    """Counts entries; asks its policy as the native cache does."""

    kv_bytes = 4096
    n_rebases = 0

    def __init__(self, context: FakeContext, policy: Any) -> None:
        self.context, self.budget, self.n_recent = context, policy.budget, policy.n_recent
        self.fn: Any = None
        self.n_evicted = 0
        self.rooms: list[int] = []  # entries of each eviction
        self.is_closed = False
        self.error: BaseException | None = None  # raised behind a decode
        self.groups = (self,)

    def set_policy(self, fn: Any) -> None:
        self.fn = fn

    def used(self) -> int:
        return len(self.context.seen) - self.n_evicted

    @property
    def used_bytes(self) -> int:
        return 64 * self.used()

    def rollback_min(self) -> int:
        return max(0, len(self.context.seen) - self.n_recent) if self.n_evicted else 0

    def make_room(self, n_keep: int) -> int:
        n = self.used() - n_keep
        if n <= 0:
            return 0
        pos = np.full((1, 1, 256), -1, np.int32)
        pos[0, 0, : self.used()] = np.arange(self.n_evicted, len(self.context.seen))
        scores = np.zeros(pos.shape, np.float32)
        n_past = len(self.context.seen)
        self.fn(
            SimpleNamespace(
                scores=scores,
                pos=pos,
                n_past=n_past,
                n_used=self.used(),
                layer_ids=(0,),
                observation=None,
                recalled=np.zeros(pos.shape, np.bool_),
                rows=PLAIN,
            ),
            n,
        )
        self.n_evicted += n
        self.rooms.append(n)
        return n

    def raised(self) -> BaseException | None:
        raised, self.error = self.error, None
        return raised

    def save(self) -> bytes:
        return self.n_evicted.to_bytes(4)

    def load(self, data: bytes) -> None:
        self.n_evicted = int.from_bytes(data)

    def close(self) -> None:
        self.is_closed = True


@dataclass
class FakeAttic:
    """Notes where it is asked."""

    context: FakeContext
    every: int = 0
    is_empty: bool = False
    asked: list[int] = field(default_factory=list)  # first positions of the batches that recall
    texts: list[int] = field(default_factory=list)  # those of batches that recall for themselves
    is_armed: bool = False
    n_before_turn: int = 0
    pins: list[Any] = field(default_factory=list)
    n_asking: int = 0
    budget: int = 20
    exchanged: list[int] = field(default_factory=list)  # positions at which what was asked for came back

    def __post_init__(self) -> None:
        self.context.attic = self

    @property
    def options(self) -> AtticOptions:
        return AtticOptions("ram", every=self.every)

    def begin_turn(self) -> None:
        self.n_before_turn = len(self.asked)

    @property
    def serves_texts(self) -> bool:
        return self.n_asking == 0

    def may_hold_any(self, n_past: int) -> bool:
        return not self.is_empty or n_past > self.budget

    def n_question(self, pins: Sequence[tuple[int, int]], end: int, n_batch: int) -> int:
        return min(n_batch, N_QUESTION)

    def begin(self, pos: int) -> None:
        """A batch at pos is decoded."""
        if self.is_armed:
            self.is_armed = False
            self.asked.append(pos)

    def withdraw(self) -> None:
        self.is_armed = False

    def interval(self) -> int:
        return self.every

    def recall_next(self, n_past: int, pins: Sequence[tuple[int, int]], asking: str = "question") -> None:
        assert n_past == len(self.context.seen)
        if asking == "text":
            self.texts.append(n_past)
            return
        self.is_armed = True
        self.pins.append(tuple(pins))

    def exchange_asked(self, *, is_counted: bool) -> None:
        self.exchanged.append(len(self.context.seen))

    @property
    def n_recalled(self) -> int:
        return len(self.asked)

    n_bytes: int = 0

    def report(self) -> AtticReport:
        return AtticReport("ram", 0, self.n_bytes, 1, 0, 0.0)


class Greedy:
    def __init__(self) -> None:
        self.accepted: list[int] = []

    def sample(self, logits: NDArray[np.float32], tokens: NDArray[np.intc]) -> int | None:
        return int(logits.argmax())

    def accept(self, token: int) -> None:
        self.accepted.append(token)


def engine(n_ctx: int = 100, **knobs: Any) -> tuple[Engine, FakeContext]:
    context = FakeContext(**knobs)
    return Engine(context, n_ctx=n_ctx), context


def evicting(budget: int = 20, policy: Any = None, **knobs: Any) -> tuple[Engine, FakeContext, FakeCache]:
    context = FakeContext(**knobs)
    policy = policy or make("streaming", budget=budget, n_sink=0, n_recent=8)
    cache = FakeCache(context, policy)
    return Engine(context, None, policy, cache=cache), context, cache


def logits_are_right(e: Engine, context: FakeContext) -> bool:
    return e.logits is not None and int(e.logits.argmax()) == context.expected(e.tokens)


def take(e: Engine, n: int, **kwargs: Any) -> list[int]:
    return list(e.generate(Greedy(), max_tokens=n, **kwargs))

"""Evicted entries that stay within reach, and the turns that recall them."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from h2o_gguf.errors import OptionError
from h2o_gguf.policies import LayerBudgets, Policy, granularity_of

__all__ = [
    "LIMIT",
    "N_QUESTION",
    "N_QUESTION_MOST",
    "N_TEXT",
    "Asking",
    "Attic",
    "AtticOptions",
    "AtticReport",
]

Place = Literal["ram", "disk", "off"]
# Who recalls: what wants an answer, what is read on, the answer.
Asking = Literal["question", "text", "reply"]
LIMIT = 1 << 30
OWN_TYPE = -1
N_QUESTION, N_QUESTION_MOST = 16, 32  # the newest tokens of what is asked, with much room and with little
N_ROOM = 128  # entries that may be exchanged, from which on that is much
N_TEXT = 16  # fewer tokens of a text do not pay for an attic's keys
N_ASKING = 2  # times that a batch asks where all layers recall the same
N_ASKED, N_ASKED_MOST = 8, 16  # the newest of a question, whose queries are held against the attic
N_BEFORE, N_AFTER = 2, 8  # what a fact says stands behind what it is about, and will be asked for next
N_TOGETHER = N_BEFORE + 1 + N_AFTER  # entries that come with what one query asks for
N_FREE = 4096  # entries that each token of a text is held against; of more, every second, third, ... asks
N_FREE_OF_QUESTION = 16384  # the same of a question's N_ASKED_MOST tokens; of more, N_ASKED ask
N_EXACT, N_EXACT_MOST = 32, 256  # tokens of a question that attend to the attic too; fewer: none does
EXACT = 1 << 18  # such tokens times entries there, at most
TEXT_PART = 2  # a text fetches half of what a question may: its own tokens are most of what it attends to
COST = 0.1
LAST = 2**31 - 1  # beyond every position


@dataclass(frozen=True)
class AtticOptions:
    """Where evicted entries stay.

    place : "ram", "disk" (a file that ends with the process), or "off": they are lost.
    limit : bytes of their rows; beyond it the least-scored are dropped. type : ggml's number of what they are
    kept as; None: the cache's own. every : generated tokens between two recalls; 0: only what is read
    recalls; None: as often as costs little. folder : of the file; None: the system's for temporary files.

    Raises: OptionError.
    """

    place: Place = "off"
    limit: int = LIMIT
    type: int | None = None
    every: int | None = None
    folder: Path | None = None

    def __post_init__(self) -> None:
        if self.place not in get_args(Place):
            raise OptionError(f"attic is {self.place!r}: it must be 'ram', 'disk' or 'off'", "attic")
        if isinstance(self.limit, bool) or not isinstance(self.limit, int) or self.limit < 1:
            raise OptionError(f"attic_limit is {self.limit!r}: it must be bytes, 1 or more", "attic_limit")


@dataclass(frozen=True)
class AtticReport:
    """The state of an attic.

    entries : per KV head, a mean over the layers. bytes : of rows, as allocated. limit : bytes.
    dropped : entries per KV head that were dropped for want of space since the last reset.
    recalled : entries per KV head that the last turn fetched back.
    """

    place: str
    entries: int
    bytes: int
    limit: int
    dropped: int
    recalled: float


class Attic:
    """The attics of a cache's groups.

    groups : native caches, each with the n_layer and n_head_kv it is of. policy : the one whose sinks, window
    and budget a recall keeps to. n_before_turn : what had been recalled before the last turn began.
    """

    def __init__(
        self,
        groups: Sequence[Any],
        policy: Policy,
        options: AtticOptions,
        weight_bytes: int = 0,
        *,
        is_attended: bool = True,
    ) -> None:
        """weight_bytes : of the model, which a token reads. is_attended : whether attention can run over it.

        Raises: OptionError, limit, type or folder does not fit.
        """
        self._groups, self.policy, self.options = groups, policy, options
        self._weight_bytes, self._is_attended = weight_bytes, is_attended
        self.n_before_turn = 0
        kind = OWN_TYPE if options.type is None else options.type
        folder = (options.folder or Path(tempfile.gettempdir())) if options.place == "disk" else None
        n_layer = sum(group.n_layer for group in groups)
        for group in groups:
            share = options.limit * group.n_layer // n_layer
            group.attic.open(share, type_k=kind, type_v=kind, folder=folder)

    def begin_turn(self) -> None:
        """Count what is recalled from here on."""
        self.n_before_turn = self.n_recalled

    def recall_next(self, n_past: int, pins: Sequence[tuple[int, int]], asking: Asking = "question") -> None:
        """Let the next batch recall.

        n_past : its first position. pins : spans that stay in the cache. asking : the newest tokens of a
        question fetch back much, and what stands beside it, and where the attic is small they attend to all
        of it; of a text every token asks, for its own sake; a token of a reply as a question's do.
        """
        n_exact = 0
        if asking == "question":
            n_exact = self._n_exact(max(int(group.attic.info().n_entry) for group in self._groups))
        for group in self._groups:
            policy = self._policy_of(group)
            keep = [(0, policy.n_sink), *pins, (n_past - policy.n_recent, LAST)]
            n_most = _room(policy, pins)
            how = (_of_text if asking == "text" else _of_question)(n_most, group.attic.info().n_entry)
            group.attic.recall_next(keep, n_exact=n_exact, alike=granularity_of(self.policy), **how)

    def withdraw(self) -> None:
        """Let the next batch recall nothing after all."""
        for group in self._groups:
            group.attic.withdraw()

    @property
    def n_asking(self) -> int:
        """How often a batch only asks: each time it is rolled back, and decoded again after exchange_asked.

        Where all layers hold the same positions, none knows what to recall before the others have asked; and
        upper layers ask otherwise when lower ones have what they asked for.
        """
        return N_ASKING if granularity_of(self.policy) == "token" else 0

    @property
    def serves_texts(self) -> bool:
        """Whether texts recall for themselves.

        Where batches ask first they would be read three times; from a GPU's memory rows travel one by one.
        """
        return self.n_asking == 0 and all(group.info.is_host for group in self._groups)

    def may_hold_any(self, n_past: int) -> bool:
        """Whether something was evicted, or may be before a batch up to this position is computed."""
        return not self.is_empty or n_past > min(self._policy_of(group).budget for group in self._groups)

    def n_question(self, pins: Sequence[tuple[int, int]], end: int, n_batch: int) -> int:
        """The newest tokens of what is asked, which recall for its answer, in batches of their own.

        pins : spans that stay in the cache. end : the position behind what is asked. n_batch : tokens that
        are computed at once.

        Where the attic is small they attend to all of it, as many as that costs little for. Else, where much
        can come back, those before them recall as a text does, so that what the newest look back at is as it
        should be. Where little can, it goes to the newest, and more of the question sees it.
        """
        if n_exact := self._n_exact(max(self._n_entry(group, end) for group in self._groups)):
            return n_exact
        is_roomy = all(_room(self._policy_of(group), pins) >= N_ROOM for group in self._groups)
        return min(n_batch, N_QUESTION if is_roomy and self.serves_texts else N_QUESTION_MOST)

    def exchange_asked(self, *, is_counted: bool = True) -> None:
        """Exchange what the batch asked for that was rolled back.  is_counted : as recalled by the turn."""
        n_before = self.n_recalled
        for group in self._groups:
            group.attic.recall_asked()
        if not is_counted:
            self.n_before_turn += self.n_recalled - n_before

    def interval(self) -> int:
        """Generated tokens between two recalls now; 0: none recalls.

        Left to itself, a recall reads at most COST of what the tokens until the next read of weights: keys,
        and the weights once more for each time that a batch only asks.
        """
        if self.options.every is not None:
            return self.options.every
        n_read = max(1, self.n_asking) * self._total("bytes") // 2 + self.n_asking * self._weight_bytes
        return max(1, math.ceil(n_read / max(1.0, COST * self._weight_bytes)))

    @property
    def n_recalled(self) -> int:
        """Entries recalled since the sequence was cleared, of all layers and heads."""
        return self._total("n_recalled")

    @property
    def is_empty(self) -> bool:
        """Whether nothing has been evicted yet."""
        return all(group.attic.info().n_entry == 0 for group in self._groups)

    def _n_exact(self, n_entry: int) -> int:
        """How many tokens of a question may attend to as many entries beside the cache."""
        n = min(N_EXACT_MOST, EXACT // max(1, n_entry))
        return n if n >= N_EXACT and self.serves_texts and self._is_attended else 0

    def _n_entry(self, group: Any, n_past: int) -> int:
        """How many entries a group's attic will hold when the next position is n_past."""
        info = group.attic.info()
        is_full = info.n_dropped > 0
        return (
            int(info.n_entry) if is_full else max(int(info.n_entry), n_past - self._policy_of(group).budget)
        )

    def _policy_of(self, group: Any) -> Policy:
        if isinstance(self.policy, LayerBudgets):
            return self.policy.part(group.layer_ids)
        return self.policy

    def _total(self, name: str) -> int:
        return sum(int(getattr(group.attic.info(), name)) for group in self._groups)

    def report(self) -> AtticReport:
        """What it holds now."""
        n_heads = int(sum(group.n_layer * group.n_head_kv for group in self._groups))

        def mean(count: Callable[[Any], int]) -> int:
            return sum(int(count(g) * g.n_layer * g.n_head_kv) for g in self._groups) // n_heads

        return AtticReport(
            place=self.options.place,
            entries=mean(lambda group: group.attic.info().n_entry),
            bytes=self._total("bytes"),
            limit=self.options.limit,
            dropped=self._total("n_dropped") // n_heads,
            recalled=max(0, self.n_recalled - self.n_before_turn) / n_heads,
        )


def _room(policy: Policy, pins: Sequence[tuple[int, int]]) -> int:
    """As many entries as can stay when the budget is kept, whatever the window holds by then."""
    n_pinned = sum(max(0, end - max(start, policy.n_sink)) for start, end in pins)
    return max(0, policy.budget - policy.n_sink - policy.n_recent - n_pinned)


def _of_question(n_most: int, n_entry: int) -> dict[str, int]:
    """How it recalls.  n_most : entries that may be exchanged. n_entry : in the attic."""
    n_asked_most = N_ASKED_MOST if n_entry <= N_FREE_OF_QUESTION else N_ASKED
    n_asked = min(n_asked_most, max(N_ASKED, n_most // N_TOGETHER))
    return {"n_most": n_most, "n_asked": n_asked, "n_before": N_BEFORE, "n_after": N_AFTER}


def _of_text(n_most: int, n_entry: int) -> dict[str, int]:
    """The same."""
    every = max(1, -(-n_entry // N_FREE))
    # Where a text says again what it said, what stands behind is what the tokens in between would ask for.
    return {"n_most": n_most // TEXT_PART, "ask_every": every, "n_after": every - 1}

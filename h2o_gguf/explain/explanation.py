"""What was kept, what was forgotten, and what the answer would have needed."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from h2o_gguf.cancel import CancelToken
from h2o_gguf.errors import Cancelled, H2OError, OptionError
from h2o_gguf.explain.attention import Glance, full_cache_cells, glances
from h2o_gguf.explain.history import History, no_gaps
from h2o_gguf.explain.recording import Recording
from h2o_gguf.pins import Span
from h2o_gguf.policies import Policy
from h2o_gguf.protocols import Progress
from h2o_gguf.text import readable
from h2o_gguf.view import CacheView

__all__ = ["HEAVY_SHARE", "MARKED_SHARE", "Explanation", "explain_reply", "heavy_hitters", "token_texts"]

HEAVY_SHARE = 0.1
MARKED_SHARE = 0.1  # of layers and heads, for a token to be marked as what its entries are there
Shares = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Explanation:
    """One answer, and what the cache held when it was written.

    texts : of every token, n_shown; joined they are the text. A token that does not complete a character has
        none. n_past : tokens that were read; the last of an answer may not have been.
    n_prompt : where the answer begins.
    left, gaps : as in History.
    heavy : bool of the same shape: held, no sink, not pinned or recent, and among the HEAVY_SHARE of those
        with the highest scores in its layer and head.
    kept : float32[n_answer, n_past], where the query that chose each token of the answer looked: shares of
        its attention, the mean over layers and heads.
    missed : the same with a full cache, in the entries that were gone by then; None : see why_not_missed.
    kept_by_head, missed_by_head : float32[n_layer, n_head_kv, n_past], the means over the answer.
    """

    model: str
    policy: str
    budget: int
    n_sink: int
    n_recent: int
    pins: tuple[Span, ...]
    layer_ids: tuple[int, ...]
    has_scores: bool
    texts: tuple[str, ...]
    n_past: int
    n_prompt: int
    left: NDArray[np.int32]
    heavy: NDArray[np.bool_]
    kept: Shares
    missed: Shares | None
    kept_by_head: Shares
    missed_by_head: Shares | None
    why_not_missed: str = ""
    gaps: NDArray[np.int32] = field(default_factory=no_gaps)

    @property
    def n_pairs(self) -> int:
        """Layers times KV heads."""
        return int(self.left.shape[0] * self.left.shape[1])

    def held(self, n_read: int | None = None) -> NDArray[np.int64]:
        """In how many layers and heads each token was held after n_read tokens (None: now): int[n_past]."""
        return self._counts(History.held, n_read)

    def recalled(self, n_read: int | None = None) -> NDArray[np.int64]:
        """In how many of them it had been evicted before, and was fetched back: int[n_past]."""
        return self._counts(History.recalled, n_read)

    def marks(self, counts: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which tokens are shown as what they are in so many of them: bool[n_past]."""
        return counts >= max(1.0, MARKED_SHARE * self.n_pairs)

    def _counts(
        self, which: Callable[[History, int], NDArray[np.bool_]], n_read: int | None
    ) -> NDArray[np.int64]:
        marks = which(History(self.left, self.gaps), self.n_past if n_read is None else n_read)
        counts: NDArray[np.int64] = np.count_nonzero(marks, axis=(0, 1))
        return counts

    def html(self) -> str:
        """The page."""
        from h2o_gguf.explain.page import render

        return render(self)

    def write(self, path: str | Path) -> None:
        """Write the page.  Raises: OptionError, the file cannot be written."""
        try:
            Path(path).write_text(self.html(), encoding="utf-8")
        except OSError as error:
            reason = error.strerror or str(error)
            raise OptionError(
                f"cannot write {str(path)!r}: {reason[:1].lower()}{reason[1:]}", "out"
            ) from error


def explain_reply(
    llm: Any,
    recording: Recording,
    n_prompt: int,
    reply: Sequence[int],
    *,
    progress: Progress | None = None,
    cancel: CancelToken | None = None,
) -> Explanation:
    """Explain an answer that llm has just written.

    The sequence is read twice more in a second context, once with the same departures and once with none.

    llm : H2OLlama; its sequence stays. recording : made before the sequence began. n_prompt : position of the
    answer's first token. reply : its tokens. progress : called with (tokens replayed, tokens in all).

    Raises: OptionError, there is no answer, or the sequence is not text; Cancelled; OutOfMemoryError,
        NativeError; BusyError, ClosedError.
    """
    with llm.turn(cancel) as (_, token):
        engine = llm.engine
        tokens = [*engine.tokens[:n_prompt], *(int(t) for t in reply)]
        if not reply or n_prompt < 1:
            raise OptionError("there is no answer to explain: ask something first or anew", "reply")
        if engine.tokens[: len(tokens)] != tokens[: engine.n_past] or min(tokens) < 0:
            raise OptionError("the answer is not the end of what the cache holds: ask again first", "reply")
        history = recording.history()
        view: CacheView = engine.view()
        queries = range(n_prompt - 1, n_prompt - 1 + len(reply))
        n_full = full_cache_cells(llm, queries.stop)
        n_passes = 2 if n_full else 1
        n_total = n_passes * queries.stop

        def report(n_before: int) -> Progress:
            return lambda n, _: progress(n_before + n, n_total) if progress is not None else None

        def replay(of: History | None, n_before: int) -> tuple[Shares, Shares]:
            rows, by_head = [], np.zeros(history.left.shape, np.float32)
            for glance in glances(llm, tokens, queries, of, progress=report(n_before), cancel=token):
                shares = _shares(glance, engine.n_past, history if of is None else None)
                rows.append(shares.mean((0, 1)))
                by_head += shares / len(queries)
            return np.stack(rows), by_head

        kept, kept_by_head = replay(history, 0)
        missed, missed_by_head, why_not = None, None, ""
        if not n_full:
            n_train = engine.context.n_ctx_train
            why_not = f"the text has {queries.stop:,} tokens and the model was trained to see {n_train:,}"
        else:
            try:
                missed, missed_by_head = replay(None, queries.stop)
            except Cancelled:
                raise
            except (H2OError, MemoryError) as error:
                why_not = str(error)
        policy: Policy = engine.policy
        return Explanation(
            model=readable(Path(llm.model_path).stem),
            policy=policy.name,
            budget=policy.budget,
            n_sink=policy.n_sink,
            n_recent=policy.n_recent,
            pins=tuple(engine.pins),
            layer_ids=view.layer_ids,
            has_scores=policy.needs_scores,
            texts=token_texts(engine.context.vocab, tokens),
            n_past=engine.n_past,
            n_prompt=n_prompt,
            left=history.left,
            gaps=history.gaps,
            heavy=heavy_hitters(view, policy),
            kept=kept,
            missed=missed,
            kept_by_head=kept_by_head,
            missed_by_head=missed_by_head,
            why_not_missed=why_not,
        )


def heavy_hitters(view: CacheView, policy: Policy) -> NDArray[np.bool_]:
    """Which positions are heavy hitters in each layer and head: bool[n_layer, n_head_kv, n_past].

    Of the entries the policy may evict, the HEAVY_SHARE with the highest scores; equal ones oldest first.
    """
    may_go = view.evictable(policy.n_sink, policy.n_recent)
    n_top = np.ceil(HEAVY_SHARE * np.count_nonzero(may_go, axis=-1)).astype(np.int64)
    scores = np.where(may_go, view.scores, -1.0)
    order = np.lexsort((view.pos, -scores), axis=-1)
    is_top = np.arange(view.shape[-1]) < n_top[..., None]
    row, head, rank = np.nonzero(is_top)
    cell = order[row, head, rank]
    heavy = np.zeros((*view.pos.shape[:2], view.n_past), np.bool_)
    heavy[row, head, view.pos[row, head, cell]] = view.scores[row, head, cell] > 0
    return heavy


def token_texts(vocab: Any, tokens: Sequence[int]) -> tuple[str, ...]:
    """The text each token completes; joined, the text of all, with U+FFFD for what is none."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    last = len(tokens) - 1
    return tuple(decoder.decode(vocab.piece(t, special=True), i == last) for i, t in enumerate(tokens))


def _shares(glance: Glance, n_past: int, history: History | None) -> Shares:
    """Shares of each head's attention by position: float32[n_layer, n_head_kv, n_past].

    history : only what a query at this position could not see any more.
    """
    row, head, cell = np.nonzero(glance.pos >= 0)
    shares = np.zeros((*glance.pos.shape[:2], n_past), np.float32)
    total = np.maximum(glance.mass.sum(-1), np.finfo(np.float32).tiny)
    shares[row, head, glance.pos[row, head, cell]] = glance.mass[row, head, cell] / total[row, head]
    if history is not None:
        shares[~history.gone(glance.query)] = 0
    return shares

"""Where the tokens of an answer looked: the same sequence once more, in a context of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from h2o_gguf.attic import Attic
from h2o_gguf.cancel import CancelToken
from h2o_gguf.context import Context
from h2o_gguf.errors import Cancelled, NativeError
from h2o_gguf.explain.history import History, Recall
from h2o_gguf.host_memory import require_bytes
from h2o_gguf.models.memory import pad_cells
from h2o_gguf.protocols import Progress

__all__ = ["Glance", "full_cache_cells", "glances"]

# Scores that fade this fast are the attention of the newest query alone, in float32 without a remainder.
NEWEST_ONLY = 1e-30


@dataclass(frozen=True)
class Glance:
    """What one query paid attention to.

    query : its position.  pos : int32[n_layer, n_head_kv, n_cells], -1 empty.
    mass : float32 of the same shape, attention summed over the query heads of a KV head.
    """

    query: int
    pos: NDArray[np.int32]
    mass: NDArray[np.float32]


def full_cache_cells(llm: Any, n_tokens: int) -> int:
    """Cells of a cache that holds n_tokens, 0 where the model was not trained to see so many."""
    return pad_cells(n_tokens) if n_tokens <= llm.engine.context.n_ctx_train else 0


def glances(
    llm: Any,
    tokens: Sequence[int],
    queries: range,
    history: History | None,
    *,
    progress: Progress | None = None,
    cancel: CancelToken | None = None,
) -> Iterator[Glance]:
    """Read tokens up to the last query, and yield where each query looked.

    llm : H2OLlama; its own sequence stays as it is. queries : positions, consecutive.
    history : entries leave here when they left there, and are fetched back by the same tokens, which may
        choose a few others where two are attended to alike; None: nothing ever leaves.

    Raises: Cancelled; OutOfMemoryError; NativeError.
    """
    own = llm.engine.cache.info
    # A sliding window and a batch must fit, however short the text.
    n_cells = pad_cells(max(len(tokens), llm.engine.context.n_swa + llm.context_params.n_ubatch))
    evictions: dict[int, int] = {}
    recalls: dict[int, Recall] = {}
    if history is not None:
        n_cells = min(n_cells, own.n_cells + pad_cells(llm.engine.context.n_batch))
        evictions = history.evictions()
        recalls = {recall.start: recall for recall in history.recalls if recall.end > recall.start}
    stops = sorted({*evictions, *recalls})
    with _spare_cache(llm, n_cells) as (context, cache):
        n_past, shift = 0, 0  # shift : between positions and those the keys are rotated to
        attic = Attic([cache], llm.engine.policy, llm.engine.attic.options) if recalls else None
        while n_past < queries.stop:
            if history is not None and n_past in evictions:
                _evict(cache, history.leaves(n_past), evictions[n_past])
            end = _batch_end(n_past, context.n_batch, queries, stops)
            recall = recalls.get(n_past)
            if recall is not None:
                end = min(recall.end, max(n_past, queries.start) + 1)
            if end - shift > own.n_pos_max and history is not None:
                cache.rebase()
                shift = n_past - cache.used()
            if attic is not None and recall is not None:
                _decode_recalling(attic, recall, context, tokens[n_past:end], n_past, cancel)
            else:
                _decode(context, tokens[n_past:end], n_past, cancel)
            if end - 1 in queries:
                view = cache.view()
                yield Glance(end - 1, view.pos.copy(), view.scores.copy())
            n_past = end
            if progress is not None:
                progress(n_past, queries.stop)


def _batch_end(n_past: int, n_batch: int, queries: range, stops: Sequence[int]) -> int:
    """Where a batch that begins at n_past ends: queries come alone, and at a stop something happens first."""
    if n_past in queries:
        return n_past + 1
    following = next((n for n in stops if n > n_past), queries.start)
    return min(n_past + n_batch, following, queries.start)


@contextmanager
def _spare_cache(llm: Any, n_cells: int) -> Iterator[tuple[Context, Any]]:
    """A second context of the model with an empty cache that evicts only when told to."""
    from h2o_gguf.bindings import KVCache

    own = llm.engine.cache.info
    if llm.model_params.n_gpu_layers == 0:
        require_bytes(own.kv_bytes * n_cells // own.n_cells, n_cells, has_budget=False)
    params = type(llm.context_params).from_buffer_copy(llm.context_params)
    params.n_ctx = n_cells
    with ExitStack() as stack:
        native = llm.make_context(params, stack)
        address = Context.address_of(native.ctx)
        cache = stack.enter_context(KVCache(address, budget=0, decay=NEWEST_ONLY))
        context = Context(native.ctx, native.model.model)
        stack.callback(context.close)
        yield context, cache


def _evict(cache: Any, leaves: NDArray[np.int64], n: int) -> None:
    """Evict the n entries of each head that leave first."""
    pos = cache.pos
    when = np.take_along_axis(leaves, np.maximum(pos, 0).astype(np.int64), axis=-1)
    order = np.lexsort((when, pos < 0), axis=-1)
    cache.evict(order[..., :n].astype(np.int32))


def _decode_recalling(
    attic: Attic,
    recall: Recall,
    context: Context,
    tokens: Sequence[int],
    n_past: int,
    cancel: CancelToken | None,
) -> None:
    """As the engine does it: where a batch only asks, it is read again after what it asked for came back."""
    attic.recall_next(n_past, recall.pins, recall.asking)
    _decode(context, tokens, n_past, cancel)
    for n_left in reversed(range(attic.n_asking)):
        if not context.remove_from(n_past):
            return
        attic.exchange_asked()
        if n_left > 0:
            attic.recall_next(n_past, recall.pins, recall.asking)
        _decode(context, tokens, n_past, cancel)


def _decode(context: Context, tokens: Sequence[int], n_past: int, cancel: CancelToken | None) -> None:
    code = context.decode(tokens, n_past, cancel=cancel)
    if cancel is not None and cancel.cancelled:
        raise Cancelled(f"cancelled at position {n_past} of the replay")
    if code != 0:
        raise NativeError(f"llama_decode returned {code} at position {n_past} of the replay", code)

"""Tokens that were read in part, taken back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from h2o_gguf.engine import Engine
from h2o_gguf.host_memory import available_bytes
from h2o_gguf.restoring import SequenceCopy

__all__ = ["taken_back"]

N_UNCOPIED = 256  # fewer tokens can be rolled back, or are read again soon enough
COPIED_BYTES = 1 << 20  # for each token that is read: a copy shall take little of the time its reading takes
SHARE = 4  # a copy takes at most one part of so many of the memory that is free; while it is made, two


@contextmanager
def taken_back(engine: Engine, n_tokens: int) -> Iterator[None]:
    """Take the n_tokens that are read inside back if an error ends it, or Ctrl-C.

    Reading more than the recent window evicts what a rollback would need, and may recall: cache and attic are
    copied first, but where nothing will be evicted, or the copy is large for so few tokens or for the memory.
    Without one the sequence may be left as it is, and sync() reads all of it again.
    """
    n_before, was, bookmarks = engine.n_past, _moved(engine), engine.bookmarks()
    copy = SequenceCopy(engine) if _is_worth_a_copy(engine, n_tokens) else None
    try:
        yield
    except BaseException:
        engine.settle()  # which may leave less than there was
        is_there = engine.n_past >= n_before
        is_as_before = is_there and _moved(engine) == was and engine.rollback(n_before)
        if not is_as_before and copy is not None:
            copy.put_back(engine)
        elif is_as_before or (is_there and engine.rollback(n_before)):
            engine.go_back_to(bookmarks)
        raise


def _moved(engine: Engine) -> tuple[int, int]:
    """What changes where entries leave the cache or come back."""
    return engine.report().evicted, engine.attic.n_recalled if engine.attic is not None else 0


def _is_worth_a_copy(engine: Engine, n_tokens: int) -> bool:
    if engine.policy is None or n_tokens <= N_UNCOPIED or engine.holds_all(n_tokens):
        return False
    report = engine.report()
    n_bytes = report.used_bytes + (report.attic.bytes if report.attic is not None else 0)
    n_available = available_bytes()
    is_free = n_available is None or n_bytes <= n_available // SHARE
    return is_free and n_bytes <= n_tokens * COPIED_BYTES

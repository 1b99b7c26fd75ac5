"""What an engine's books say of a sequence besides its tokens and entries."""

from __future__ import annotations

from dataclasses import dataclass

from h2o_gguf.eviction import Notes
from h2o_gguf.pins import Span
from h2o_gguf.protocols import Logits

__all__ = ["Bookmarks"]


@dataclass(frozen=True)
class Bookmarks:
    """What a session does not hold, since it means nothing where the session is loaded.

    logits : after the last token. mark : the end of the last prompt, and the logits there. notes : the
    evictor's. n_before_turn : entries recalled before the last turn.
    """

    pins: tuple[Span, ...]
    logits: Logits | None
    mark: tuple[int, Logits] | None
    notes: Notes | None
    n_before_turn: int

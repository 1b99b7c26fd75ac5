"""One batch of a sequence, evaluated and entered into its books."""

from __future__ import annotations

from collections.abc import Sequence

from h2o_gguf.attic import Asking
from h2o_gguf.books import Books
from h2o_gguf.cancel import CancelToken
from h2o_gguf.errors import CacheFullError, Cancelled, NativeError
from h2o_gguf.eviction import room_failure
from h2o_gguf.protocols import Logits

__all__ = ["Decoder"]

# What llama_decode returns.
DECODE_NO_ROOM = 1
DECODE_ABORTED = 2
DECODE_NO_VICTIMS = -100  # H2OG_DECODE_FAILED: room could not be made


class Decoder(Books):
    """Evaluates batches; one that fails leaves the books as they were."""

    def _decode(self, tokens: Sequence[int], cancel: CancelToken | None) -> None:
        """Evaluate one batch and enter it into the books."""
        self._enter(tokens, self._evaluate(tokens, cancel, all_logits=self.on_logits is not None))

    def _enter(self, tokens: Sequence[int], rows: Logits) -> None:
        start = self.n_past
        self._log.extend(tokens)
        self._logits = rows[-1]
        if self.on_logits is not None:
            self.on_logits(start, rows)

    def _evaluate(self, tokens: Sequence[int], cancel: CancelToken | None, *, all_logits: bool) -> Logits:
        """Evaluate one batch; return its logits, of the last token only unless all_logits."""
        self._logits = None
        n_asking = self.recalls.n_asking
        asking = self.recalls.disarm()
        code = self.context.decode(tokens, self.n_past, all_logits=all_logits, cancel=cancel)
        for n in range(1, n_asking + 1):
            if code != 0 or not self._remove_from(self.n_past):
                break
            self.recalls.exchange_asked(self.n_past, self._pins, asks_again=n < n_asking)
            code = self.context.decode(tokens, self.n_past, all_logits=all_logits, cancel=cancel)
        is_policys = self._evictor is not None and self._evictor.has_error
        if code == 0 and not is_policys:
            if asking is not None:
                self._tell_recall(len(tokens), asking)
            return self.context.logits(len(tokens) if all_logits else 1)
        reason = room_failure() if code == DECODE_NO_VICTIMS and not is_policys else ""
        self._settle()
        self._raise_policy_error()
        if reason:
            raise NativeError(f"cannot make room for {len(tokens)} tokens: {reason}", code)
        if code == DECODE_ABORTED:
            raise Cancelled(f"cancelled at position {self.n_past}")
        if code == DECODE_NO_ROOM:
            n_used = self.cache.used() if self.cache is not None else self.n_past
            raise CacheFullError(n_used, self.context.n_cells)
        raise NativeError(
            f"llama_decode returned {code} for {len(tokens)} tokens at position {self.n_past}", code
        )

    def _tell_recall(self, n_tokens: int, asking: Asking) -> None:
        view = self.view() if self.on_recall else None
        if view is not None:
            for listener in self.on_recall:
                listener(view, n_tokens, asking)

"""One batch of a sequence, evaluated and entered into its books."""

from __future__ import annotations

from collections.abc import Sequence

from h2o_gguf.attic import Asking
from h2o_gguf.cache_books import CacheBooks
from h2o_gguf.cancel import CancelToken
from h2o_gguf.errors import CacheFullError, Cancelled, NativeError
from h2o_gguf.eviction import room_failure
from h2o_gguf.protocols import Logits

__all__ = ["Decoder"]

# What llama_decode returns.
DECODE_NO_ROOM = 1
DECODE_ABORTED = 2
DECODE_NO_VICTIMS = -100  # H2OG_DECODE_FAILED: room could not be made


class Decoder(CacheBooks):
    """Evaluates batches; one that fails leaves the books as they were."""

    def _decode(
        self, tokens: Sequence[int], cancel: CancelToken | None, asking: Asking | None = None
    ) -> None:
        """Evaluate one batch and enter it into the books.  asking : how it recalls, if there is anything."""
        all_logits = self.on_logits is not None
        self._enter(tokens, self._evaluate(tokens, cancel, all_logits=all_logits, asking=asking))

    def _enter(self, tokens: Sequence[int], rows: Logits) -> None:
        start = self.n_past
        self._logits = None  # so that they are never those of another token, whenever Ctrl-C comes
        self._log.extend(tokens)
        self._logits = rows[-1]
        if self.on_logits is not None:
            self.on_logits(start, rows)

    def _evaluate(
        self,
        tokens: Sequence[int],
        cancel: CancelToken | None,
        *,
        all_logits: bool,
        asking: Asking | None = None,
    ) -> Logits:
        """Evaluate one batch; return its logits, of the last token only unless all_logits."""
        self._raised()  # what a call that Ctrl-C tore off did not tell
        if all_logits and asking == "text":
            asking = None  # or tokens would be guessed with what later ones asked for
        asking = self.recalls.granted(asking, self.n_past + len(tokens))
        n_asking = self.recalls.n_asking if asking else 0
        code = self._run(tokens, cancel, all_logits, asking)
        for n in range(1, n_asking + 1):
            if code != 0 or not self._remove_from(self.n_past):
                break
            self.recalls.exchange_asked(is_counted=n == n_asking)
            code = self._run(tokens, cancel, all_logits, asking if n < n_asking else None)
        raised = self._raised()
        if code == 0 and raised is None:
            if asking is not None:
                self._tell_recall(len(tokens), asking)
            return self.context.logits(len(tokens) if all_logits else 1)
        reason = room_failure() if code == DECODE_NO_VICTIMS and raised is None else ""
        self.settle()
        if asking is not None:
            self._tell_recall(0, asking)  # entries have changed places in the layers that were computed
        if raised is not None:
            raise raised from raised.__cause__
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

    def _run(
        self, tokens: Sequence[int], cancel: CancelToken | None, all_logits: bool, asking: Asking | None
    ) -> int:
        with self.recalls.armed(asking, self.n_past, self._pins):
            return self.context.decode(tokens, self.n_past, all_logits=all_logits, cancel=cancel)

    def _raised(self) -> BaseException | None:
        """What the policy, or Ctrl-C while it was asked, raised behind native code; it is told once."""
        return self.cache.raised() if self.cache is not None else None

    def _tell_recall(self, n_tokens: int, asking: Asking) -> None:
        # A batch that might have been the first to evict, and was not, had nothing to recall.
        view = self.view() if self.on_recall and self.recalls.has_any else None
        if view is not None:
            for listener in self.on_recall:
                listener(view, n_tokens, asking)

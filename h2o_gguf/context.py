"""A llama.cpp context as the engine sees it: one sequence, decoded a batch at a time."""

from __future__ import annotations

import ctypes
import ctypes.util
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from h2o_gguf.cancel import CancelToken
from h2o_gguf.errors import NativeError
from h2o_gguf.native import C
from h2o_gguf.vocab import Vocab

__all__ = ["Context"]

END = -1  # llama.cpp: to the end of the sequence


def _abort_function() -> Any:
    """A C function that reads a cancel flag, so that compute threads never wait for the GIL.

    llama.cpp calls bool f(void * data) after every node. strlen on the two-byte flag of a CancelToken is 0
    while running and 1 once cancelled, which is that function.
    """
    library = ctypes.CDLL("msvcrt" if sys.platform == "win32" else ctypes.util.find_library("c"))
    return ctypes.cast(library.strlen, C.ggml_abort_callback)


class Context:
    """Decodes tokens and hands out logits.  ctx, model : pointers, which must outlive this object."""

    def __init__(self, ctx: Any, model: Any) -> None:
        self.ctx = ctx
        self.model = model
        self.vocab = Vocab(model)
        self.n_batch = min(int(C.llama_n_batch(ctx)), int(C.llama_n_ubatch(ctx)))
        self.n_cells = int(C.llama_n_ctx(ctx))
        self.n_ctx_train = int(C.llama_model_n_ctx_train(model))
        self.n_swa = int(C.llama_model_n_swa(model))
        self._memory = C.llama_get_memory(ctx)
        self._batch: Any = C.llama_batch_init(self.n_batch, 0, 1)
        self._token = np.ctypeslib.as_array(self._batch.token, (self.n_batch,))
        self._pos = np.ctypeslib.as_array(self._batch.pos, (self.n_batch,))
        self._output = np.ctypeslib.as_array(self._batch.logits, (self.n_batch,))
        np.ctypeslib.as_array(self._batch.n_seq_id, (self.n_batch,))[:] = 1
        for i in range(self.n_batch):
            self._batch.seq_id[i][0] = 0
        self._abort = _abort_function()
        self._cancel: CancelToken | None = None

    def close(self) -> None:
        """Free the batch; the context and the model belong to the caller."""
        if self._batch is not None:
            batch, self._batch = self._batch, None
            del self._token, self._pos, self._output
            C.llama_batch_free(batch)

    @staticmethod
    def address_of(ctx: Any) -> int:
        """Address behind a llama_context pointer."""
        return int(ctypes.cast(ctx, ctypes.c_void_p).value or 0)

    def decode(
        self, tokens: Sequence[int], pos: int, *, all_logits: bool = False, cancel: CancelToken | None = None
    ) -> int:
        """Evaluate at most n_batch tokens at positions pos, pos + 1, ...; return llama_decode's code."""
        n = len(tokens)
        self._token[:n] = tokens
        self._pos[:n] = np.arange(pos, pos + n)
        self._output[:n] = all_logits
        self._output[n - 1] = True
        self._batch.n_tokens = n
        try:
            if cancel is not None:
                self._cancel = cancel  # lives as long as native code may read its flag
                C.llama_set_abort_callback(self.ctx, self._abort, ctypes.c_void_p(cancel.address))
            code = int(C.llama_decode(self.ctx, self._batch))
            if code == 0:
                C.llama_synchronize(self.ctx)
            return code
        finally:
            if cancel is not None:
                C.llama_set_abort_callback(self.ctx, C.ggml_abort_callback(), ctypes.c_void_p(0))

    def logits(self, n_rows: int = 1) -> NDArray[np.float32]:
        """The last n_rows rows of logits of the last decode: a copy, float32[n_rows, n_vocab]."""
        pointer = C.llama_get_logits_ith(self.ctx, -n_rows)
        if not pointer:
            raise NativeError(f"llama.cpp has no logits for the last {n_rows} tokens")
        return np.ctypeslib.as_array(pointer, (n_rows, self.vocab.n_tokens)).astype(np.float32, copy=True)

    def n_past(self) -> int:
        """Next position in llama.cpp's books; 0 when the memory is empty or there is none."""
        if self._memory is None:
            return 0
        return int(C.llama_memory_seq_pos_max(self._memory, 0)) + 1

    def remove_from(self, pos: int) -> bool:
        """Remove every position >= pos; False, and nothing removed, where that cannot be exact."""
        if self._memory is None:
            return False
        if self.n_swa > 0 and int(C.llama_memory_seq_pos_min(self._memory, 0)) > max(0, pos - self.n_swa):
            return False  # the window's cache has dropped rows that the shorter sequence would need
        return bool(C.llama_memory_seq_rm(self._memory, 0, pos, END))

    def clear(self) -> None:
        """Forget the whole sequence."""
        if self._memory is not None:
            C.llama_memory_clear(self._memory, False)

    def save(self) -> memoryview:
        """The state of the memory, as llama.cpp writes it."""
        size = int(C.llama_state_get_size(self.ctx))
        buffer = np.empty(size, np.uint8)
        n = int(C.llama_state_get_data(self.ctx, _pointer(buffer), size))
        return buffer[:n].data

    def load(self, data: bytes | memoryview) -> bool:
        """Restore what `save` returned; False if llama.cpp refuses it."""
        return int(
            C.llama_state_set_data(self.ctx, _pointer(np.frombuffer(data, np.uint8)), len(data))
        ) == len(data)


def _pointer(array: NDArray[np.uint8]) -> Any:
    """Where native code finds the bytes, for as long as the array lives."""
    return array.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))

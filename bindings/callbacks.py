"""Python functions as the policy and the observer of a native cache, and what they raise there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from h2o_gguf.bindings import library
from h2o_gguf.bindings.library import ffi
from h2o_gguf.bindings.native_view import NativeView
from h2o_gguf.bindings.status import check
from h2o_gguf.errors import H2OError, PolicyError

__all__ = ["Callbacks", "as_cells"]

POLICY_RAISED = 1


class Callbacks:
    """Keeps the functions of one cache reachable for as long as native code may call them.

    view : makes a NativeView of an h2og_view. shape : (n_layer, n_head_kv).
    """

    def __init__(self, view: Callable[[Any], NativeView], shape: tuple[int, int]) -> None:
        self._view, self._shape = view, shape
        self._installed: dict[str, Any] = {}
        self._raised: BaseException | None = None

    def set_policy(self, handle: Any, fn: Callable[[NativeView, int], NDArray[np.int32]] | None) -> None:
        """Set the policy of the native handle.  See KVCache."""

        def call(_user: Any, native: Any, n: int, out: Any) -> int:
            if fn is None:
                return POLICY_RAISED
            victims = as_cells(fn(self._view(native), n), (*self._shape, n))
            np.frombuffer(ffi.buffer(out, victims.size * 4), dtype=np.int32)[:] = victims.ravel()
            return 0

        self._install(handle, "policy", call if fn is not None else None, POLICY_RAISED)

    def set_observer(self, handle: Any, fn: Callable[[NativeView, int], None] | None) -> None:
        """Set the observer of the native handle.  See KVCache."""

        def call(_user: Any, native: Any, n_tokens: int) -> None:
            if fn is not None:
                fn(self._view(native), n_tokens)

        self._install(handle, "observer", call if fn is not None else None, None)

    def raised(self) -> BaseException | None:
        """Return what one of them raised since the last call of this method, if anything."""
        raised, self._raised = self._raised, None
        return raised

    @contextlib.contextmanager
    def reraising(self) -> Iterator[None]:
        """Raise what one of them raises inside, instead of the native error that follows from it."""
        self._raised = None
        try:
            yield
        except H2OError as error:
            raised = self.raised()
            if raised is not None:
                raise raised from raised.__cause__ or error
            raise

    def clear(self) -> None:
        """Let go of them: native code calls none any more."""
        self._installed.clear()

    def _install(self, handle: Any, name: str, call: Callable[..., Any] | None, on_error: int | None) -> None:
        def remember(_type: object, value: BaseException, _traceback: object) -> int | None:
            self._raised = value
            return on_error

        callback = ffi.NULL if call is None else ffi.callback(f"h2og_{name}_fn", call, onerror=remember)
        check(getattr(library.lib(), f"h2og_set_{name}")(handle, callback, ffi.NULL))
        self._installed[name] = callback


def as_cells(victims: Any, shape: tuple[int, ...]) -> NDArray[np.int32]:
    """Victims as the native part takes them.  Raises: PolicyError, another shape or no cells."""
    array = np.asarray(victims)
    if array.shape != shape or not np.issubdtype(array.dtype, np.integer):
        raise PolicyError(f"victims are {array.dtype}{list(array.shape)} instead of int32{list(shape)}")
    if array.size and (array.min() < 0 or array.max() >= 2**31):
        raise PolicyError(f"victims go from {array.min()} to {array.max()}: those are no cells")
    return np.ascontiguousarray(array, dtype=np.int32)

"""Every error this package raises on purpose, under one root.

A text says what happened, why, and what to do, with the numbers; the numbers are attributes as well.
Each class also derives from the builtin a caller would catch, and knows the exit code of the command line.
"""

from __future__ import annotations

from typing import Any, ClassVar

__all__ = [
    "BudgetError",
    "BusyError",
    "CacheFullError",
    "Cancelled",
    "ChecksumError",
    "ClosedError",
    "ContextOverflowError",
    "H2OError",
    "LibraryError",
    "ModelFileError",
    "NativeError",
    "OptionError",
    "OutOfMemoryError",
    "PolicyError",
    "StateFileError",
    "UnsupportedModelError",
    "in_short",
]

BUG, USAGE, MODEL_FILE, NO_FIT, NATIVE, INTERRUPTED = 1, 2, 3, 4, 5, 130


class H2OError(Exception):
    """The root of all errors here.

    exit_code : the command line's exit code: 1 a bug, 2 usage, 3 model file, 4 does not fit, 5 native
        failure, 130 interrupted.
    """

    exit_code: ClassVar[int] = BUG

    def __init__(self, text: str) -> None:
        super().__init__(text)

    def __reduce__(self) -> tuple[Any, ...]:
        # Subclasses take numbers, not a text, so the usual cls(*args) could not rebuild them.
        return _rebuild, (type(self), self.args, dict(self.__dict__))


def _rebuild(cls: type[H2OError], args: tuple[Any, ...], facts: dict[str, Any]) -> H2OError:
    error = cls.__new__(cls)
    error.args = args
    error.__dict__.update(facts)
    return error


class ContextOverflowError(H2OError, ValueError):
    """The prompt is longer than the context and nothing may be evicted, or the model's positions end there.

    n_prompt_tokens, n_ctx : tokens. http_status, http_type : for servers.
    """

    exit_code = NO_FIT
    http_status: ClassVar[int] = 400
    http_type: ClassVar[str] = "exceed_context_size_error"

    def __init__(
        self, n_prompt_tokens: int, n_ctx: int, hint: str | None = None, *, evicts: bool = False
    ) -> None:
        """evicts : there is room, but no position: the model has learned n_ctx of them, and no more."""
        if evicts:
            hint = hint or "shorten it, or begin a new sequence"
            text = f"the model's positions end at {n_ctx} and cannot be renumbered: {hint}"
        else:
            hint = hint or "shorten it, raise n_ctx, or choose a policy that evicts (such as 'h2o+')"
            text = f"the context holds {n_ctx} and nothing may be evicted: {hint}"
        super().__init__(f"the prompt has {n_prompt_tokens} tokens, {text}")
        self.n_prompt_tokens = n_prompt_tokens
        self.n_ctx = n_ctx


class BudgetError(H2OError, ValueError):
    """The budget is illegal, or what must be kept does not fit into it.

    budget : the value that was refused, as given. n_sink, n_recent, n_pinned : entries per KV head
    protected by each (0 where it does not matter). n_protected : their sum, unless given.
    """

    exit_code = USAGE

    def __init__(
        self,
        text: str,
        *,
        budget: object = None,
        n_sink: int = 0,
        n_recent: int = 0,
        n_pinned: int = 0,
        n_protected: int | None = None,
    ) -> None:
        super().__init__(text)
        self.budget = budget
        self.n_sink = n_sink
        self.n_recent = n_recent
        self.n_pinned = n_pinned
        self.n_protected = n_sink + n_recent + n_pinned if n_protected is None else n_protected


class CacheFullError(H2OError, RuntimeError):
    """The cache is full and the policy evicts nothing.  n_used, n_cells : entries per KV head."""

    exit_code = NO_FIT

    def __init__(self, n_used: int, n_cells: int, hint: str | None = None) -> None:
        hint = hint or "stop here, raise n_ctx, or choose a policy that evicts (such as 'h2o+')"
        super().__init__(
            f"the KV cache is full: {n_used} of {n_cells} cells are used and nothing may be evicted: {hint}"
        )
        self.n_used = n_used
        self.n_cells = n_cells


class OutOfMemoryError(MemoryError, H2OError):  # in this order, or pickle could not make one
    """The cache does not fit into memory.

    n_bytes, n_available : what it takes, and what there is; 0 where llama.cpp found out, and does not say.
    """

    exit_code = NO_FIT

    def __init__(self, text: str, *, n_bytes: int = 0, n_available: int = 0) -> None:
        super().__init__(text)
        self.n_bytes = n_bytes
        self.n_available = n_available


class PolicyError(H2OError, RuntimeError):
    """A policy raised, or returned victims it may not choose.  policy : its name, "" if unknown."""

    exit_code = BUG

    def __init__(self, text: str, *, policy: str = "") -> None:
        super().__init__(f"policy {policy!r}: {text}" if policy else text)
        self.policy = policy


class OptionError(H2OError, ValueError):
    """Options that are illegal, alone or together.  options : their names."""

    exit_code = USAGE

    def __init__(self, text: str, *options: str) -> None:
        super().__init__(text)
        self.options = options


class UnsupportedModelError(H2OError, ValueError):
    """The model loads, but entries cannot be evicted from its cache.  architecture, reason : words."""

    exit_code = MODEL_FILE

    def __init__(self, architecture: str, reason: str) -> None:
        super().__init__(
            f"cannot evict from a {architecture!r} model: {reason}; use policy 'none' or another model"
        )
        self.architecture = architecture
        self.reason = reason


class ModelFileError(H2OError, OSError):
    """The model file cannot be read or is no model.  path : the file. reason : the native reason."""

    exit_code = MODEL_FILE

    def __init__(self, path: object, reason: str) -> None:
        super().__init__(f"cannot load the model {str(path)!r}: {reason}")
        self.path = str(path)
        self.reason = reason


class ChecksumError(H2OError, OSError):
    """A file's bytes are not the expected ones.  path : the file. expected, actual : sha256 in hex."""

    exit_code = MODEL_FILE

    def __init__(self, path: object, expected: str, actual: str) -> None:
        super().__init__(
            f"{str(path)!r} has sha256 {actual}, expected {expected}: "
            "it is damaged or another file; fetch it again"
        )
        self.path = str(path)
        self.expected = expected
        self.actual = actual


class StateFileError(H2OError, ValueError):
    """A saved session is damaged or belongs to another model.  path : the file, "" for bytes."""

    exit_code = USAGE

    def __init__(self, text: str, *, path: object = "") -> None:
        super().__init__(text)
        self.path = str(path)


class NativeError(H2OError, RuntimeError):
    """A native call failed.  code : what it returned."""

    exit_code = NATIVE

    def __init__(self, text: str, code: int = -1) -> None:
        super().__init__(text)
        self.code = code


class LibraryError(H2OError, ImportError):
    """The native library is missing, stock (without our hooks) or older than this package."""

    exit_code = NATIVE


class BusyError(H2OError, RuntimeError):
    """Another thread is using this object, which serves one call at a time."""

    exit_code = BUG

    def __init__(self, what: str = "this object") -> None:
        super().__init__(f"another thread is using {what}: wait for its call to end, or cancel it")


class ClosedError(H2OError, ValueError):
    """The object was closed before this call."""

    exit_code = BUG

    def __init__(self, what: str = "this object") -> None:
        super().__init__(f"{what} is closed: make a new one")


class Cancelled(H2OError, RuntimeError):
    """The call was cancelled; the object stays usable."""

    exit_code = INTERRUPTED

    def __init__(self, text: str = "cancelled") -> None:
        super().__init__(text)


def in_short(error: BaseException) -> str:
    """One line for an error of somebody else's: its class and its text."""
    return f"{type(error).__name__}: {error}"

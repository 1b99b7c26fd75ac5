"""Turns native status codes into exceptions: the one place that does."""

from __future__ import annotations

import re

from h2o_gguf.bindings.library import last_error
from h2o_gguf.errors import (
    BudgetError,
    CacheFullError,
    ClosedError,
    H2OError,
    NativeError,
    OptionError,
    PolicyError,
    StateFileError,
    UnsupportedModelError,
)

__all__ = ["check", "check_options"]

INVALID, UNSUPPORTED, FULL, POLICY, POSITION, NATIVE, DETACHED, STATE = range(-1, -9, -1)


def check(status: int) -> int:
    """Return status if it is not negative, else raise the error it stands for, with the native text."""
    if status >= 0:
        return status
    raise error_of(status, last_error())


def check_options(status: int, *options: str) -> int:
    """As check, for arguments that a user chose.  Raises: OptionError, with these options."""
    if status == INVALID:
        raise OptionError(last_error(), *options)
    return check(status)


def error_of(status: int, text: str) -> H2OError:
    """The exception for a status and its text."""
    if status == INVALID and text.startswith("a budget"):
        return BudgetError(text)
    if status == UNSUPPORTED:
        quoted = text.split("'")
        return UnsupportedModelError(quoted[1] if len(quoted) > 2 else "this", text)
    if status == POLICY:
        return PolicyError(text)
    if status == DETACHED:
        return ClosedError(text)
    if status == STATE:
        return StateFileError(text)
    if status in (FULL, POSITION):
        n_used, n_allowed = ([int(n) for n in re.findall(r"\d+", text)] + [-1, -1])[:2]
        error = CacheFullError(n_used, n_allowed)
        error.args = (text,)
        return error
    return NativeError(text, code=status)

"""One check of all arguments at the edge of the Python API, from the annotations of the function itself."""

from __future__ import annotations

import functools
import inspect
import reprlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast, get_args, get_type_hints

from pydantic import TypeAdapter, ValidationError

from h2o_gguf.errors import OptionError
from h2o_gguf.kinds import KIND

__all__ = ["checked", "kinds_of"]

F = TypeVar("F", bound=Callable[..., Any])

SHOWN_CHARS = 60


def checked(target: F) -> F:
    """Return a function, or a dataclass, that refuses arguments its annotations do not allow before it runs.

    Annotations are kinds of h2o_gguf.kinds and h2o_gguf.options. What is allowed arrives as plain Python:
    numpy's numbers as int and float, paths as str. Defaults are not checked.

    Raises: OptionError, with the name of every option that is wrong, its value, and what it can be.
    """
    if isinstance(target, type):
        target.__init__ = _checked(target.__init__, target)  # type: ignore[misc]
        return cast(F, target)
    return cast(F, _checked(target, target))


def kinds_of(target: Callable[..., Any]) -> dict[str, Any]:
    """The annotation of every option of a function or a dataclass, those behind ** included."""
    hints = get_type_hints(target, include_extras=True)
    kinds: dict[str, Any] = {}
    for name, parameter in inspect.signature(target).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:  # Unpack[a TypedDict]
            kinds |= get_type_hints(get_args(hints[name])[0], include_extras=True)
        elif name != "self":
            kinds[name] = hints[name]
    return kinds


def _checked(function: Any, annotated: Any) -> Any:
    what = function.__qualname__.removesuffix(".__init__").rpartition(".")[2]
    signature = inspect.signature(function)

    @functools.cache
    def kinds() -> dict[str, tuple[Any, TypeAdapter[Any]]]:
        return {name: (kind, TypeAdapter(kind)) for name, kind in kinds_of(annotated).items()}

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        unknown = [name for name in kwargs if name not in kinds() and name != "self"]
        if unknown:
            takes = ", ".join(kinds())
            raise OptionError(f"unknown option {', '.join(unknown)}: {what} takes {takes}", *unknown)
        plain: dict[str, Any] = {}
        problems: dict[str, str] = {}
        for name, value in _bound(what, signature, args, kwargs).items():
            if name == "self":
                plain[name] = value
                continue
            kind, adapter = kinds()[name]
            try:
                plain[name] = adapter.validate_python(value)
            except ValidationError as error:
                problems[name] = _problem(name, error.errors(include_url=False)[0], kind)
        if problems:
            raise OptionError("; ".join(problems.values()), *problems)
        return function(**plain)

    return call


def _bound(
    what: str, signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments by name, those behind ** among them."""
    try:
        given = dict(signature.bind(*args, **kwargs).arguments)
    except TypeError as error:
        raise OptionError(f"{what}: {error}; it takes {', '.join(signature.parameters)}") from None
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            given |= given.pop(name, {})
    return given


def _problem(name: str, error: Mapping[str, Any], kind: Any) -> str:
    path = error["loc"]
    place = name + "".join(f"[{step!r}]" for step in path)
    if error["type"] == "missing":
        return f"{place} is missing"
    if error["type"] == "value_error":  # the words of a validator
        return f"{place}: {error['ctx']['error']}"
    text = f"{place} is {_shown(error['input'])}: "
    if error["type"] != KIND:  # pydantic's words
        words = str(error["msg"])
        return text + words[:1].lower() + words[1:]
    allows_none = not path and type(None) in get_args(kind)
    return f"{text}it must be {error['msg']}{', or None' * allows_none}"


def _shown(value: Any) -> str:
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = SHOWN_CHARS
    try:
        return short.repr(value)
    except Exception:  # whatever an object of the caller's does when it is shown
        return f"an object of {type(value)}"

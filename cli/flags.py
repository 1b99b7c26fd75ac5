"""Options that several commands share, as dataclasses.

A command names a group of options as one parameter; typer sees the fields of the dataclass instead:

    @expand_flags(temp=0.8)
    def chat(model: ModelFlags, sampling: SamplingFlags) -> None: ...

and the named fields get the defaults of this command.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, get_type_hints

import typer

__all__ = ["FromEnvironment", "expand_flags", "mark_environment"]


class FromEnvironment:
    """A value that a variable of the environment gave, so that a flag may overrule it."""


class NumberFromEnvironment(int, FromEnvironment):
    """Such a number."""


class TextFromEnvironment(str, FromEnvironment):
    """Such a text."""


def mark_environment(context: typer.Context, parameter: typer.CallbackParam, value: Any) -> Any:
    """The value of an option; a FromEnvironment if that is where it is from."""
    source = context.get_parameter_source(parameter.name or "")
    if source is None or source.name != "ENVIRONMENT" or value is None:
        return value
    return NumberFromEnvironment(value) if isinstance(value, int) else TextFromEnvironment(value)


def expand_flags(**defaults: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that makes the fields of dataclass parameters parameters of their own.

    defaults : field names and this command's defaults for them.
    """

    def expand(command: Callable[..., None]) -> Callable[..., None]:
        return _expand(command, defaults)

    return expand


def _expand(command: Callable[..., None], defaults: dict[str, Any]) -> Callable[..., None]:
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, tuple[type[Any], list[str]]] = {}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        group = hints[name]
        if is_dataclass(group) and isinstance(group, type):
            group_parameters = _parameters(group, defaults)
            groups[name] = group, [p.name for p in group_parameters]
            parameters += group_parameters
        else:
            parameters.append(parameter.replace(annotation=group, kind=inspect.Parameter.KEYWORD_ONLY))

    def expanded(**values: Any) -> None:
        for name, (group, names) in groups.items():
            values[name] = group(**{field: values.pop(field) for field in names})
        command(**values)

    expanded.__name__ = command.__name__
    expanded.__doc__ = command.__doc__
    expanded.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": None}
    expanded.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return expanded


def _parameters(group: type[Any], defaults: dict[str, Any]) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=defaults.get(
                field.name, inspect.Parameter.empty if field.default is MISSING else field.default
            ),
            annotation=hints[field.name],
        )
        for field in fields(group)
    ]

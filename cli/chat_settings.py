"""The settings that /set changes during a chat."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from h2o_gguf.errors import OptionError

if TYPE_CHECKING:
    from h2o_gguf.chat import ChatSession

__all__ = ["change_setting", "show_settings"]


@dataclass(frozen=True)
class Setting:
    """field : of the sampling options.  parse : from text.  low, high : legal range.  hole : but not this."""

    field: str
    parse: Callable[[str], float]
    low: float
    high: float | None = None
    hole: float | None = None


SAMPLING = {
    "temp": Setting("temperature", float, 0.0),
    "top_k": Setting("top_k", int, 0),
    "top_p": Setting("top_p", float, 0.0, 1.0),
    "min_p": Setting("min_p", float, 0.0, 1.0),
    "repeat_penalty": Setting("repeat_penalty", float, 0.01),
    "repeat_last_n": Setting("penalty_last_n", int, 0),
    "presence_penalty": Setting("presence_penalty", float, -2.0, 2.0),
    "frequency_penalty": Setting("frequency_penalty", float, -2.0, 2.0),
}
OTHERS = {"seed": Setting("seed", int, -1), "predict": Setting("max_tokens", int, -1, hole=0)}
ALIASES = {"temperature": "temp", "n": "predict", "max_tokens": "predict"}


def show_settings(session: ChatSession, name: str = "") -> list[str]:
    """One line for each setting, or for the one that is named.  Raises: OptionError, unknown name."""
    values = {name: getattr(session.sampling, setting.field) for name, setting in SAMPLING.items()}
    values["seed"] = "random" if session.seed is None else session.seed
    values["predict"] = -1 if session.max_tokens is None else session.max_tokens
    width = max(map(len, values))
    if name:
        values = {key: values[key] for key in [_key(name)]}
    return [f"{key:<{width}}  {value}" for key, value in values.items()]


def change_setting(session: ChatSession, name: str, text: str) -> str:
    """Change one setting; return what to say.  Raises: OptionError, unknown name or illegal value."""
    key = _key(name)
    setting = SAMPLING.get(key) or OTHERS[key]
    value = _parse(key, setting, text)
    if key == "seed":
        session.seed = None if value < 0 else int(value)
        session.reseed()
    elif key == "predict":
        session.max_tokens = None if value < 0 else int(value)
    else:
        session.sampling = replace(session.sampling, **{setting.field: value})  # type: ignore[arg-type]
    return f"{key} is {value}"


def _key(name: str) -> str:
    """The setting that is meant."""
    key = name.lower().lstrip("-").replace("-", "_")
    key = ALIASES.get(key, key)
    if key not in SAMPLING and key not in OTHERS:
        raise OptionError(f"there is no setting {name!r}: there are {', '.join([*SAMPLING, *OTHERS])}", "set")
    return key


def _parse(name: str, setting: Setting, text: str) -> float:
    kind = "a whole number" if setting.parse is int else "a number"
    span = f"at least {setting.low:g}" if setting.high is None else f"{setting.low:g} to {setting.high:g}"
    span += f", not {setting.hole:g}" if setting.hole is not None else ""
    try:
        value = setting.parse(text)
    except ValueError:
        raise OptionError(f"{name} is {text!r}: it must be {kind}, {span}", name) from None
    if (
        value == setting.hole
        or not value >= setting.low
        or (setting.high is not None and not value <= setting.high)
    ):
        raise OptionError(f"{name} is {text}: it must be {kind}, {span}", name)
    return value

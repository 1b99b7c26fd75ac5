"""What users say of budgets by layer: a list, a pyramid, or a file of losses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from h2o_gguf.calibration import Calibration
from h2o_gguf.errors import OptionError
from h2o_gguf.policies import Pyramid, Split

__all__ = ["PYRAMID", "Budgets", "read_layer_budgets"]

PYRAMID = "pyramid"
Budgets = tuple[int, ...] | Callable[[int], Split]  # one for each layer, or how to split a mean


def read_layer_budgets(said: str | Sequence[int], model_path: str | None = None) -> Budgets:
    """Return the budgets, or how a mean is split into them.

    said : entries per KV head of each layer that is evicted from, as numbers or as text with commas between;
    "pyramid" or "pyramid:BETA", see policies.pyramid; or the name of a file that Calibration.save wrote.
    model_path : of the model a file must be of; None: any.

    Raises: OptionError, it is nothing of that, or the file is another model's.
    """
    if not isinstance(said, str):
        return tuple(said)
    words = [word.strip() for word in said.split(",")]
    if all(word.isdecimal() for word in words):
        return tuple(int(word) for word in words)
    kind, colon, beta = said.partition(":")
    if kind != PYRAMID:
        return Calibration.load(said, model_path).split
    try:
        steep = partial(Pyramid, beta=float(beta)) if colon else Pyramid
        steep(1)
    except (ValueError, OptionError):
        raise OptionError(
            f"layer_budgets is {said!r}: behind {PYRAMID}: stands how steep, a number of 1 or more, such as "
            f"{PYRAMID}:2",
            "layer_budgets",
        ) from None
    return steep

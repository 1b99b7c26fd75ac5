"""From sampling flags to options."""

from __future__ import annotations

from typing import TYPE_CHECKING

from h2o_gguf.cli.options import SamplingFlags

if TYPE_CHECKING:
    from h2o_gguf.sampling import SamplingOptions

__all__ = ["max_tokens", "sampling_options", "seed_of"]


def sampling_options(flags: SamplingFlags) -> SamplingOptions:
    """The options of the samplers."""
    from h2o_gguf.sampling import SamplingOptions

    return SamplingOptions(
        temperature=flags.temp,
        top_k=flags.top_k,
        top_p=flags.top_p,
        min_p=flags.min_p,
        repeat_penalty=flags.repeat_penalty,
    )


def max_tokens(flags: SamplingFlags) -> int | None:
    """The limit of a reply; None for the library's."""
    return None if flags.predict < 0 else flags.predict


def seed_of(flags: SamplingFlags) -> int | None:
    """The seed; None for a random one, which llama.cpp calls -1."""
    return None if flags.seed is None or flags.seed < 0 else flags.seed

"""What is expected of each tiny model, at two layers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Expected:
    """evicts : from its cache. renumbers : positions can be made consecutive again. layers : evicted from.

    says : words of the refusal. min_layers : it can be built with. is_generative : it decodes tokens.
    """

    evicts: bool
    renumbers: bool = False
    layers: tuple[int, ...] = ()
    says: str = ""
    min_layers: int = 1
    is_generative: bool = True


_PLAIN = Expected(True, True, (0, 1))
_SECOND = Expected(True, True, (1,), min_layers=2)

ARCHITECTURES: dict[str, Expected] = {
    "llama": _PLAIN,
    "llama-yarn": _PLAIN,
    "llama-linear": _PLAIN,
    "llama-rope-factors": _PLAIN,
    "smollm3": _PLAIN,
    "qwen2": _PLAIN,
    "qwen2vl": _PLAIN,
    "phi2": _PLAIN,
    "phi3": _PLAIN,
    "phi3-longrope": _PLAIN,
    "gemma2": _SECOND,
    "gemma3": Expected(True, True, (1,)),  # windowed from two layers on
    "gpt2": Expected(True, False, (0, 1)),
    "gptneox": _PLAIN,
    "gpt-oss": _SECOND,
    "deepseek2": _PLAIN,
    "deepseek2-mha": _PLAIN,
    "jamba": _SECOND,
    "lfm2": _SECOND,
    "mamba": Expected(False, says="no KV cache; its state does not grow"),
    "bloom": Expected(False, says="ALiBi"),
    "bert": Expected(False, says="encoder", is_generative=False),
}

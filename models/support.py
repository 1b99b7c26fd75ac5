"""Can entries be evicted from this model's cache, from which layers, and if not, why not."""

from __future__ import annotations

from dataclasses import dataclass

from h2o_gguf.errors import UnsupportedModelError
from h2o_gguf.models import architectures as arch
from h2o_gguf.models.shape import ModelShape

__all__ = ["Support", "cannot_generate", "require_support", "support"]

SHORTEST = 16  # positions


@dataclass(frozen=True)
class Support:
    """The verdict on one model.

    can_evict : entries can be evicted. reason : why not, in words ("" when they can).
    evicted_layers : model layers whose entries are evicted; the others are left alone.
    can_renumber : positions can be made consecutive again, so that a sequence may go past n_pos_max.
    n_pos_max : positions the model can be asked for before that, 0 to n_pos_max - 1.
    notes : what a user should know, a sentence each.
    """

    can_evict: bool
    reason: str
    evicted_layers: tuple[int, ...]
    can_renumber: bool
    n_pos_max: int
    notes: tuple[str, ...] = ()


def support(shape: ModelShape) -> Support:
    """The verdict on this model, known before native code loads it."""
    reason = _refusal(shape)
    if reason:
        return Support(False, reason, (), False, shape.n_ctx_train)
    return Support(
        True, "", shape.full_layers, not shape.has_learned_positions, _n_pos_max(shape), tuple(_notes(shape))
    )


def require_support(shape: ModelShape) -> Support:
    """The verdict, or UnsupportedModelError when entries cannot be evicted."""
    verdict = support(shape)
    if not verdict.can_evict:
        raise UnsupportedModelError(shape.architecture, verdict.reason)
    return verdict


def cannot_generate(shape: ModelShape) -> str:
    """Why text cannot be generated token by token, in words; "" where it can."""
    others = arch.ENCODER | arch.DIFFUSION | arch.ENCODER_DECODER | arch.DRAFT
    return _refusal(shape) if shape.architecture in others or not shape.is_causal else ""


def _refusal(shape: ModelShape) -> str:
    name = shape.architecture
    if shape.memory == "recurrent":
        return "it has no KV cache; its state does not grow"
    if name in arch.ENCODER:
        return "it has no KV cache; it is an encoder that sees its whole input at once"
    if name in arch.DIFFUSION:
        return "it has no KV cache; it is a diffusion model that rewrites its whole text at each step"
    if name in arch.ENCODER_DECODER:
        return "its decoder also reads an encoder's output, which is not in the cache"
    if name in arch.DRAFT:
        return "it only guesses tokens for another model and shares that model's state"
    if shape.memory == "special":
        return f"it uses {shape.memory_name}, whose parts address entries by cell"
    if not shape.is_causal:
        return "its attention also looks ahead, so no entry is ever old"
    if shape.has_alibi:
        return (
            "its attention bias (ALiBi) is computed from the cache's own cell positions, "
            "which are not the entries' positions after a per-head eviction"
        )
    if shape.n_layer_kv < shape.n_layer:
        return (
            f"only its first {shape.n_layer_kv} of {shape.n_layer} layers have a cache and the others read "
            "theirs; eviction for shared layers is not built yet"
        )
    if _n_pos_max(shape) < SHORTEST:
        return f"its context of {_n_pos_max(shape)} tokens leaves no room for what is kept and a batch"
    if not shape.full_layers:
        windowed = "every attention layer has a sliding window, so its cache does not grow"
        return windowed if any(shape.swa_layers) else "none of its layers has a KV cache"
    return _uneven(shape)


def _uneven(shape: ModelShape) -> str:
    heads = sorted({shape.n_head_kv[il] for il in shape.full_layers})
    if len(heads) > 1:
        return (
            f"its layers have different numbers of KV heads ({', '.join(map(str, heads))}); "
            "eviction for such models is not built yet"
        )
    if heads == [0]:
        return "its attention layers have no KV heads"
    dims = sorted({shape.head_dims(il) for il in shape.full_layers})
    if len(dims) > 1:
        return "its layers have different head sizes; eviction for such models is not built yet"
    return ""


def _n_pos_max(shape: ModelShape) -> int:
    # llama.cpp picks the short factors whenever the cache has at most n_ctx_orig cells, and a bounded cache
    # is small: beyond n_ctx_orig those factors are not the ones the model was trained with.
    return min(shape.n_ctx_orig, shape.n_ctx_train) if shape.has_long_rope else shape.n_ctx_train


def _notes(shape: ModelShape) -> list[str]:
    notes = []
    n_windowed = sum(shape.swa_layers[il] for il in shape.attention_layers)
    if n_windowed:
        notes.append(
            f"{n_windowed} layers with a sliding window of {shape.n_swa} tokens are left alone; entries are "
            f"evicted from the {len(shape.full_layers)} full-attention layers"
        )
    n_recurrent = sum(shape.recurrent_layers)
    if n_recurrent:
        notes.append(
            f"{n_recurrent} layers carry recurrent state, which cannot be rolled back; entries are evicted "
            f"from the {len(shape.full_layers)} attention layers"
        )
    if shape.has_learned_positions:
        notes.append(
            f"positions are learned, so the text ends at {shape.n_ctx_train} tokens whatever is evicted"
        )
    if shape.is_mla:
        notes.append("the cache holds one compressed latent per token and layer, and no V")
    if shape.rope in ("mrope", "imrope"):
        notes.append("positions have several axes (M-RoPE); eviction is for text only")
    if shape.has_long_rope:
        notes.append(
            f"its RoPE factors change above {shape.n_ctx_orig} positions, so positions are renumbered there"
        )
    n_plain = sum(not shape.rope_layers[il] for il in shape.full_layers)
    if n_plain and shape.rope != "none":
        notes.append(f"{n_plain} of the layers evicted from use no RoPE, so nothing is rotated there")
    if shape.n_splits > 1:
        notes.append(f"this is the first of {shape.n_splits} files")
    return notes

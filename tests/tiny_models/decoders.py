"""Decoders whose only memory is a KV cache: plain, windowed, compressed (MLA), mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .writer import Tiny

# Queries and keys are a little larger than unit variance, so that attention has peaks to tell apart.
SHARP = 1.6
# Logits are spread out, so that the best token is clear.
LOUD = 3.0


def embeddings(t: Tiny, *, output: bool = True, bias: bool = False) -> None:
    t.normal("token_embd.weight", (t.n_vocab, t.n_embd), 1.0 if output else LOUD / np.sqrt(t.n_embd))
    t.norm("output_norm", t.n_embd, bias=bias)
    if output:
        t.matrix("output.weight", t.n_embd, t.n_vocab, gain=LOUD)


def qkv(t: Tiny, b: str, *, bias: bool = False, n_kv: int | None = None) -> None:
    n_kv = t.n_head_kv if n_kv is None else n_kv
    widths = {"q": t.n_head * t.head_dim, "k": n_kv * t.head_dim, "v": n_kv * t.head_dim}
    for part, n in widths.items():
        t.matrix(f"{b}.attn_{part}.weight", t.n_embd, n, gain=1.0 if part == "v" else SHARP)
        if bias:
            t.bias(f"{b}.attn_{part}", n)


def fused_qkv(t: Tiny, b: str, *, bias: bool = False) -> None:
    n_q, n_kv = t.n_head * t.head_dim, t.n_head_kv * t.head_dim
    t.matrix(f"{b}.attn_qkv.weight", t.n_embd, n_q + 2 * n_kv)
    t.tensors[f"{b}.attn_qkv.weight"][: n_q + n_kv] *= SHARP
    if bias:
        t.bias(f"{b}.attn_qkv", n_q + 2 * n_kv)


def out(t: Tiny, b: str, *, bias: bool = False) -> None:
    t.matrix(f"{b}.attn_output.weight", t.n_head * t.head_dim, t.n_embd)
    if bias:
        t.bias(f"{b}.attn_output", t.n_embd)


def gated_ffn(t: Tiny, b: str) -> None:
    t.norm(f"{b}.ffn_norm", t.n_embd)
    t.matrix(f"{b}.ffn_gate.weight", t.n_embd, t.n_ff)
    t.matrix(f"{b}.ffn_up.weight", t.n_embd, t.n_ff)
    t.matrix(f"{b}.ffn_down.weight", t.n_ff, t.n_embd)


def plain_ffn(t: Tiny, b: str) -> None:
    for part, n_in, n_out in (("up", t.n_embd, t.n_ff), ("down", t.n_ff, t.n_embd)):
        t.matrix(f"{b}.ffn_{part}.weight", n_in, n_out)
        t.bias(f"{b}.ffn_{part}", n_out)


def llama_like(t: Tiny, arch: str, *, bias: bool = False) -> None:
    t.begin(arch)
    t.set("rope.dimension_count", t.head_dim)
    embeddings(t)
    for il in range(t.n_layer):
        b = f"blk.{il}"
        t.norm(f"{b}.attn_norm", t.n_embd)
        qkv(t, b, bias=bias)
        out(t, b)
        gated_ffn(t, b)


def llama(t: Tiny) -> None:
    llama_like(t, "llama")


def llama_yarn(t: Tiny) -> None:
    """YaRN by 4 over a quarter of the context."""
    llama(t)
    t.set("rope.scaling.type", "yarn")
    t.set("rope.scaling.factor", 4.0)
    t.set("rope.scaling.original_context_length", max(1, t.n_ctx_train // 4))


def llama_linear(t: Tiny) -> None:
    """Linear position interpolation by 2."""
    llama(t)
    t.set("rope.scaling.type", "linear")
    t.set("rope.scaling.factor", 2.0)


def llama_rope_factors(t: Tiny) -> None:
    """Frequency factors as Llama 3.1 has them: 1 for the fast half, rising to 8 for the slow one."""
    llama(t)
    n = t.head_dim // 2
    t.value("rope_freqs.weight", np.concatenate([np.ones(n // 2), np.linspace(1.0, 8.0, n - n // 2)]))


def smollm3(t: Tiny) -> None:
    """Each fourth layer has no RoPE."""
    llama_like(t, "smollm3")


def qwen2(t: Tiny) -> None:
    llama_like(t, "qwen2", bias=True)


def qwen2vl(t: Tiny) -> None:
    llama_like(t, "qwen2vl", bias=True)
    n = t.head_dim // 8
    t.set("rope.dimension_sections", [2 * n, n, n, 0])


def phi3(t: Tiny) -> None:
    t.begin("phi3")
    t.set("rope.dimension_count", t.head_dim)
    embeddings(t)
    for il in range(t.n_layer):
        b = f"blk.{il}"
        t.norm(f"{b}.attn_norm", t.n_embd)
        fused_qkv(t, b)
        out(t, b)
        t.norm(f"{b}.ffn_norm", t.n_embd)
        t.matrix(f"{b}.ffn_up.weight", t.n_embd, 2 * t.n_ff)
        t.matrix(f"{b}.ffn_down.weight", t.n_ff, t.n_embd)


def phi3_longrope(t: Tiny) -> None:
    """Two sets of frequency factors, for up to a quarter of the context and beyond."""
    phi3(t)
    t.set("rope.scaling.type", "longrope")
    t.set("rope.scaling.factor", 4.0)
    t.set("rope.scaling.original_context_length", max(1, t.n_ctx_train // 4))
    n = t.head_dim // 2
    t.value("rope_factors_short.weight", np.linspace(1.0, 1.5, n))
    t.value("rope_factors_long.weight", np.linspace(1.0, 4.0, n))


def gemma_like(t: Tiny, arch: str, *, qk_norm: bool) -> None:
    t.begin(arch)
    t.set("attention.key_length", t.head_dim)
    t.set("attention.value_length", t.head_dim)
    embeddings(t, output=False)
    for il in range(t.n_layer):
        b = f"blk.{il}"
        t.norm(f"{b}.attn_norm", t.n_embd)
        qkv(t, b)
        out(t, b)
        t.norm(f"{b}.post_attention_norm", t.n_embd)
        if qk_norm:
            t.norm(f"{b}.attn_q_norm", t.head_dim)
            t.norm(f"{b}.attn_k_norm", t.head_dim)
        gated_ffn(t, b)
        t.norm(f"{b}.post_ffw_norm", t.n_embd)


def gemma2(t: Tiny) -> None:
    """Even layers are windowed; attention and final logits are soft-capped."""
    if t.n_layer < 2:
        raise ValueError("gemma2 needs 2 layers: the first one is windowed")
    gemma_like(t, "gemma2", qk_norm=False)
    t.set("attention.sliding_window", t.n_swa)
    t.set("attn_logit_softcapping", 5.0)
    t.set("final_logit_softcapping", 10.0)


def gemma3(t: Tiny) -> None:
    """Every layer but each second one is windowed (real ones: each sixth); one layer alone is not."""
    gemma_like(t, "gemma3", qk_norm=True)
    t.set("rope.freq_base", 1e6)
    if t.n_layer > 1:
        t.set("attention.sliding_window", t.n_swa)
        t.set("attention.sliding_window_pattern", 2)


def gpt2(t: Tiny) -> None:
    """Learned absolute positions, one KV head per query head."""
    t.n_head_kv = t.n_head
    t.begin("gpt2", rms=False)
    embeddings(t, bias=True)
    t.normal("position_embd.weight", (t.n_ctx_train, t.n_embd), 0.5)
    for il in range(t.n_layer):
        b = f"blk.{il}"
        t.norm(f"{b}.attn_norm", t.n_embd, bias=True)
        fused_qkv(t, b, bias=True)
        out(t, b, bias=True)
        t.norm(f"{b}.ffn_norm", t.n_embd, bias=True)
        plain_ffn(t, b)


def bloom(t: Tiny) -> None:
    """ALiBi."""
    t.n_head_kv = t.n_head
    t.begin("bloom", rms=False)
    embeddings(t, bias=True)
    t.norm("token_embd_norm", t.n_embd, bias=True)
    for il in range(t.n_layer):
        b = f"blk.{il}"
        t.norm(f"{b}.attn_norm", t.n_embd, bias=True)
        fused_qkv(t, b, bias=True)
        out(t, b, bias=True)
        t.norm(f"{b}.ffn_norm", t.n_embd, bias=True)
        plain_ffn(t, b)


def gptneox(t: Tiny) -> None:
    """Partial rotary: the first quarter of each head."""
    t.n_head_kv = t.n_head
    t.begin("gptneox", rms=False)
    t.set("use_parallel_residual", True)
    t.set("rope.dimension_count", t.head_dim // 4)
    embeddings(t, bias=True)
    for il in range(t.n_layer):
        b = f"blk.{il}"
        t.norm(f"{b}.attn_norm", t.n_embd, bias=True)
        fused_qkv(t, b, bias=True)
        out(t, b, bias=True)
        t.norm(f"{b}.ffn_norm", t.n_embd, bias=True)
        plain_ffn(t, b)


def phi2(t: Tiny) -> None:
    """Partial rotary: the first half of each head."""
    t.n_head_kv = t.n_head
    t.begin("phi2", rms=False)
    t.set("rope.dimension_count", t.head_dim // 2)
    embeddings(t, bias=True)
    t.bias("output", t.n_vocab)
    for il in range(t.n_layer):
        b = f"blk.{il}"
        t.norm(f"{b}.attn_norm", t.n_embd, bias=True)
        qkv(t, b, bias=True)
        out(t, b, bias=True)
        plain_ffn(t, b)


def gpt_oss(t: Tiny) -> None:
    """Attention sinks as logits, mixture of experts, even layers windowed."""
    if t.n_layer < 2:
        raise ValueError("gpt-oss needs 2 layers: the first one is windowed")
    n_expert = 4
    t.begin("gpt-oss")
    t.set("rope.dimension_count", t.head_dim)
    t.set("attention.key_length", t.head_dim)
    t.set("attention.value_length", t.head_dim)
    t.set("attention.sliding_window", t.n_swa)
    t.set("expert_count", n_expert)
    t.set("expert_used_count", 2)
    t.set("expert_feed_forward_length", t.n_ff)
    embeddings(t)
    for il in range(t.n_layer):
        b = f"blk.{il}"
        t.norm(f"{b}.attn_norm", t.n_embd)
        t.norm(f"{b}.post_attention_norm", t.n_embd)
        qkv(t, b, bias=True)
        out(t, b, bias=True)
        t.normal(f"{b}.attn_sinks.weight", (t.n_head,), 1.0)
        t.matrix(f"{b}.ffn_gate_inp.weight", t.n_embd, n_expert)
        t.bias(f"{b}.ffn_gate_inp", n_expert)
        for part, n_in, n_out in (
            ("gate", t.n_embd, t.n_ff),
            ("up", t.n_embd, t.n_ff),
            ("down", t.n_ff, t.n_embd),
        ):
            t.matrix(f"{b}.ffn_{part}_exps.weight", n_in, n_out, n_expert)
            t.normal(f"{b}.ffn_{part}_exps.bias", (n_expert, n_out), 0.1)


def deepseek2(t: Tiny) -> None:
    """MLA: the cache holds a latent of 128 and 64 rotated values per token, and no V."""
    latent_attention(t, is_mla=True)


def deepseek2_mha(t: Tiny) -> None:
    """The older kind of file: full keys (128, the last 64 rotated) and values (64) per head."""
    latent_attention(t, is_mla=False)


def latent_attention(t: Tiny, *, is_mla: bool) -> None:
    n_lora, n_rope, n_nope, n_v = 128, 64, 64, 64
    t.n_head_kv = 1 if is_mla else t.n_head
    t.begin("deepseek2")
    t.set("attention.q_lora_rank", 64)
    t.set("attention.kv_lora_rank", n_lora)
    t.set("attention.key_length", n_lora + n_rope if is_mla else n_nope + n_rope)
    t.set("attention.value_length", n_lora if is_mla else n_v)
    if is_mla:
        t.set("attention.key_length_mla", n_nope + n_rope)
        t.set("attention.value_length_mla", n_v)
    t.set("rope.dimension_count", n_rope)
    t.set("leading_dense_block_count", t.n_layer)  # no experts
    t.set("expert_feed_forward_length", t.n_ff)
    t.set("expert_shared_count", 0)
    embeddings(t)
    for il in range(t.n_layer):
        b = f"blk.{il}"
        t.norm(f"{b}.attn_norm", t.n_embd)
        t.matrix(f"{b}.attn_q_a.weight", t.n_embd, 64)
        t.norm(f"{b}.attn_q_a_norm", 64)
        t.matrix(f"{b}.attn_q_b.weight", 64, t.n_head * (n_nope + n_rope), gain=SHARP)
        t.matrix(f"{b}.attn_kv_a_mqa.weight", t.n_embd, n_lora + n_rope, gain=SHARP)
        t.norm(f"{b}.attn_kv_a_norm", n_lora)
        if is_mla:
            t.matrix(f"{b}.attn_k_b.weight", n_nope, n_lora, t.n_head, gain=SHARP)
            t.matrix(f"{b}.attn_v_b.weight", n_lora, n_v, t.n_head)
        else:
            t.matrix(f"{b}.attn_kv_b.weight", n_lora, t.n_head * (n_nope + n_v), gain=SHARP)
        t.matrix(f"{b}.attn_output.weight", t.n_head * n_v, t.n_embd)
        gated_ffn(t, b)


DECODERS: dict[str, Callable[[Tiny], None]] = {
    "llama": llama,
    "llama-yarn": llama_yarn,
    "llama-linear": llama_linear,
    "llama-rope-factors": llama_rope_factors,
    "smollm3": smollm3,
    "qwen2": qwen2,
    "qwen2vl": qwen2vl,
    "phi2": phi2,
    "phi3": phi3,
    "phi3-longrope": phi3_longrope,
    "gemma2": gemma2,
    "gemma3": gemma3,
    "gpt2": gpt2,
    "gptneox": gptneox,
    "gpt-oss": gpt_oss,
    "bloom": bloom,
    "deepseek2": deepseek2,
    "deepseek2-mha": deepseek2_mha,
}

"""Models with recurrent state: alone (mamba) or beside attention (hybrids)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .decoders import embeddings, gated_ffn, out, qkv
from .writer import Tiny

D_CONV, D_STATE, DT_RANK, L_CACHE = 4, 16, 16, 3


def mamba_keys(t: Tiny) -> None:
    t.set("ssm.conv_kernel", D_CONV)
    t.set("ssm.inner_size", 2 * t.n_embd)
    t.set("ssm.state_size", D_STATE)
    t.set("ssm.time_step_rank", DT_RANK)


def mamba_layer(t: Tiny, b: str) -> None:
    n = 2 * t.n_embd
    t.matrix(f"{b}.ssm_in.weight", t.n_embd, 2 * n)
    t.matrix(f"{b}.ssm_conv1d.weight", D_CONV, n)
    t.bias(f"{b}.ssm_conv1d", n)
    t.matrix(f"{b}.ssm_x.weight", n, DT_RANK + 2 * D_STATE)
    t.matrix(f"{b}.ssm_dt.weight", DT_RANK, n)
    t.normal(f"{b}.ssm_dt.bias", (n,), 0.5, -2.0)  # softplus: steps of about 0.1, so the past lasts
    t.value(f"{b}.ssm_a", -np.tile(np.arange(1, D_STATE + 1), (n, 1)))
    t.value(f"{b}.ssm_d", np.ones(n))
    t.matrix(f"{b}.ssm_out.weight", n, t.n_embd)


def mamba(t: Tiny) -> None:
    t.begin("mamba", heads=False)
    mamba_keys(t)
    t.set("attention.head_count", 0)
    embeddings(t)
    for il in range(t.n_layer):
        t.norm(f"blk.{il}.attn_norm", t.n_embd)
        mamba_layer(t, f"blk.{il}")


def jamba(t: Tiny) -> None:
    """Mamba in even layers, attention without RoPE in odd ones."""
    t.begin("jamba")
    mamba_keys(t)
    t.set("attention.head_count_kv", [t.n_head_kv if il % 2 else 0 for il in range(t.n_layer)])
    embeddings(t)
    for il in range(t.n_layer):
        b = f"blk.{il}"
        t.norm(f"{b}.attn_norm", t.n_embd)
        if il % 2:
            qkv(t, b)
            out(t, b)
        else:
            mamba_layer(t, b)
            t.norm(f"{b}.ssm_dt_norm", DT_RANK)
            t.norm(f"{b}.ssm_b_norm", D_STATE)
            t.norm(f"{b}.ssm_c_norm", D_STATE)
        gated_ffn(t, b)


def lfm2(t: Tiny) -> None:
    """Short convolutions in even layers, attention with RoPE in odd ones."""
    t.begin("lfm2")
    t.set("shortconv.l_cache", L_CACHE)
    t.set("attention.head_count_kv", [t.n_head_kv if il % 2 else 0 for il in range(t.n_layer)])
    embeddings(t)
    t.tensors["token_embd_norm.weight"] = t.tensors.pop("output_norm.weight")
    for il in range(t.n_layer):
        b = f"blk.{il}"
        t.norm(f"{b}.attn_norm", t.n_embd)
        if il % 2:
            qkv(t, b)
            out(t, b)
            t.norm(f"{b}.attn_q_norm", t.head_dim)
            t.norm(f"{b}.attn_k_norm", t.head_dim)
        else:
            t.matrix(f"{b}.shortconv.conv.weight", L_CACHE, t.n_embd)
            t.matrix(f"{b}.shortconv.in_proj.weight", t.n_embd, 3 * t.n_embd)
            t.matrix(f"{b}.shortconv.out_proj.weight", t.n_embd, t.n_embd)
        gated_ffn(t, b)


MIXERS: dict[str, Callable[[Tiny], None]] = {"mamba": mamba, "jamba": jamba, "lfm2": lfm2}

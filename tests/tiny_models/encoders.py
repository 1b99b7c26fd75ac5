"""Encoders: they see their whole input at once and keep nothing."""

from __future__ import annotations

from collections.abc import Callable

from .decoders import out, plain_ffn, qkv
from .writer import Tiny


def bert(t: Tiny) -> None:
    t.n_head_kv = t.n_head
    t.begin("bert", rms=False)
    t.set("attention.causal", False)
    t.set("pooling_type", 1)
    t.normal("token_embd.weight", (t.n_vocab, t.n_embd), 1.0)
    t.normal("token_types.weight", (2, t.n_embd), 0.1)
    t.normal("position_embd.weight", (t.n_ctx_train, t.n_embd), 0.5)
    t.norm("token_embd_norm", t.n_embd, bias=True)
    for il in range(t.n_layer):
        b = f"blk.{il}"
        qkv(t, b, bias=True)
        out(t, b, bias=True)
        t.norm(f"{b}.attn_output_norm", t.n_embd, bias=True)
        plain_ffn(t, b)
        t.norm(f"{b}.layer_output_norm", t.n_embd, bias=True)


ENCODERS: dict[str, Callable[[Tiny], None]] = {"bert": bert}

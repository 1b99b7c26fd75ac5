"""The shape of a model as the runtime will see it: layers, heads, windows, RoPE, memory.

Mirrors what llama.cpp derives from the same metadata, so that what is said before loading is what happens
after it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from h2o_gguf.errors import ModelFileError
from h2o_gguf.models import architectures as arch
from h2o_gguf.models.header import Header, LongArray, read_header
from h2o_gguf.models.limits import check_limits
from h2o_gguf.models.windows import windows_of

__all__ = ["MemoryKind", "ModelShape", "RopeKind", "read_shape", "shape_of"]

MAX_LAYERS = 512  # llama.cpp's
MAX_WIDTH = 1 << 16  # heads of a layer, values of a head: many times what any model has

RopeKind = Literal["none", "norm", "neox", "mrope", "imrope"]
MemoryKind = Literal["kv", "iswa", "hybrid", "hybrid-iswa", "recurrent", "special", "none"]


@dataclass(frozen=True)
class ModelShape:
    """What is known of a model from its header. Per-layer tuples have n_layer_all entries.

    architecture, name : as in the file.
    n_layer : layers of the trunk. n_layer_all : with the layers for multi-token prediction behind them.
    n_embd, n_vocab, n_ctx_train : as llama.cpp.
    n_ctx_orig : context before the RoPE scaling was applied (n_ctx_train without scaling).
    n_head, n_head_kv : per layer; 0 in layers without attention.
    head_dim_k, head_dim_v : of full-attention layers; *_swa : of windowed layers.
    n_swa : window, tokens; 0 none. swa_layers : which layers are windowed.
    recurrent_layers : which layers carry recurrent state. attention_layers : which have a KV cache entry.
    n_embd_r, n_embd_s : float32 values of recurrent state per recurrent layer.
    memory : the kind of cache llama.cpp makes; memory_name : its words when it is a special one.
    rope : kind. n_rot : rotated values per head. rope_offset : index of the first one. rope_layers : which
    layers rotate keys. rope_scaling : as in the file, "none" without. has_rope_factors : frequency factors.
    has_long_rope : two sets of factors, chosen by the size of the context.
    is_mla : keys are compressed latents and there is no V in the cache.
    has_alibi, has_learned_positions : positions come in by other ways than RoPE.
    n_layer_kv : layers that own their cache, the rest reuse one of these.
    is_causal : False for encoders and diffusion models.
    file_type : weight types, most bytes first. n_file_bytes : of the file. has_chat_template : in the file.
    n_splits : number of files the model is spread over.
    """

    architecture: str
    name: str
    n_layer: int
    n_layer_all: int
    n_embd: int
    n_vocab: int
    n_ctx_train: int
    n_ctx_orig: int
    n_head: tuple[int, ...]
    n_head_kv: tuple[int, ...]
    head_dim_k: int
    head_dim_v: int
    head_dim_k_swa: int
    head_dim_v_swa: int
    n_swa: int
    swa_layers: tuple[bool, ...]
    recurrent_layers: tuple[bool, ...]
    attention_layers: tuple[int, ...]
    n_embd_r: int
    n_embd_s: int
    memory: MemoryKind
    memory_name: str
    rope: RopeKind
    n_rot: int
    rope_offset: int
    rope_layers: tuple[bool, ...]
    rope_scaling: str
    has_rope_factors: bool
    has_long_rope: bool
    is_mla: bool
    has_alibi: bool
    has_learned_positions: bool
    n_layer_kv: int
    is_causal: bool
    file_type: str
    n_file_bytes: int
    has_chat_template: bool
    n_splits: int

    def head_dims(self, il: int) -> tuple[int, int]:
        """head_dim of K and of V in layer il's cache; V is 0 when it has no V."""
        k, v = (
            (self.head_dim_k_swa, self.head_dim_v_swa)
            if self.swa_layers[il]
            else (self.head_dim_k, self.head_dim_v)
        )
        return k, 0 if self.is_mla else v

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Layers of the trunk whose attention reaches back without a window."""
        return tuple(il for il in self.attention_layers if il < self.n_layer and not self.swa_layers[il])

    @property
    def evicted_layers(self) -> tuple[int, ...]:
        """Layers whose cache entries can be evicted from: those whose cache has no window."""
        has_window = self.memory in ("iswa", "hybrid-iswa")
        return tuple(il for il in self.attention_layers if not (has_window and self.swa_layers[il]))


def read_shape(path: str | os.PathLike[str]) -> ModelShape:
    """The shape of the model in this file.  Raises ModelFileError."""
    return shape_of(read_header(path))


def shape_of(header: Header) -> ModelShape:
    """The shape of the model this header describes.  Raises ModelFileError: facts are missing or absurd."""
    check_limits(header)
    return _Reader(header).shape()


class _Reader:
    def __init__(self, header: Header) -> None:
        self.header = header
        self.name = header.architecture

    def fail(self, reason: str) -> ModelFileError:
        return ModelFileError(self.header.path, reason)

    def number(self, key: str, default: int | None = None, **limits: int) -> int:
        return self.header.number(key, default, **limits)

    def width(self, key: str, default: int | None = None) -> int:
        """Values of one head."""
        return self.number(key, default, high=MAX_WIDTH)

    def per_layer(self, key: str, n: int, default: tuple[int, ...], **limits: int) -> tuple[int, ...]:
        """A number for all layers, or an array of at least n; layers behind it are 0."""
        value = self.header.get(key)
        if value is None:
            return default
        if isinstance(value, tuple):
            if len(value) < n:
                raise self.fail(f"{self.name}.{key} has {len(value)} values for {n} layers")
            return tuple(self.header.checked(f"{self.name}.{key}", v, **limits) for v in value[:n])
        return (self.number(key, **limits),) * n

    def shape(self) -> ModelShape:
        header, name = self.header, self.name
        n_all = self.number("block_count", low=1, high=MAX_LAYERS)
        n_layer = n_all - self.number("nextn_predict_layers", 0, high=n_all)
        n_head = self.per_layer("attention.head_count", n_all, (0,) * n_all, high=MAX_WIDTH)
        n_head_kv = self.per_layer("attention.head_count_kv", n_all, n_head, high=MAX_WIDTH)
        n_ff = self.per_layer("feed_forward_length", n_all, (0,) * n_all)
        n_embd = self.number("embedding_length", low=1)
        n_ctx = self.number("context_length", low=1)

        if name == "nanbeige":  # its layers run several times, each pass with a cache of its own
            loops = max(1, self.number("num_loops", 1, high=MAX_LAYERS // n_all))
            n_head, n_head_kv, n_ff = n_head * loops, n_head_kv * loops, n_ff * loops
            n_layer = n_all = n_all * loops

        dim = n_embd // n_head[0] if n_head[0] else 0
        dim_k = self.width("attention.key_length", dim) if n_head[0] else 0
        dim_v = self.width("attention.value_length", dim) if n_head[0] else 0
        if name == "plamo2":
            dim_k = self.width("attention.key_length", dim_k)
            dim_v = self.width("attention.value_length", dim_v)
        if name == "kimi-k3":
            dim_v = self.width("attention.kv_lora_rank")
        n_rot = self.number("rope.dimension_count", dim_k) if n_head[0] else 0
        if name == "step35":
            n_rot //= 2

        n_swa, swa = windows_of(header, n_layer, n_all)
        recurrent = self.recurrent(n_layer, n_all, n_head_kv, n_ff)
        if name == "lfm2" and n_swa:
            swa = tuple(il < n_layer and not recurrent[il] for il in range(n_all))
        memory, memory_name = self.memory(any(swa))
        n_kv = n_all
        if name == "gemma3n":
            n_kv = min(20, n_all)
        elif name == "gemma4":
            n_kv = n_all - self.number("attention.shared_kv_layers", 0, high=n_all)
        rope = self.rope()
        if n_head[0] and rope != "none" and (n_rot % 2 or not 0 < n_rot <= dim_k):
            raise self.fail(f"it rotates {n_rot} of the {dim_k} values of a head: the file is damaged")
        tensors = header.tensors
        kda = self.number("kda.head_dim", 0)
        return ModelShape(
            architecture=name,
            name=str(header.metadata.get("general.name") or Path(header.path).stem),
            n_layer=n_layer,
            n_layer_all=n_all,
            n_embd=n_embd,
            n_vocab=self.vocabulary(),
            n_ctx_train=n_ctx,
            n_ctx_orig=self.number("rope.scaling.original_context_length", n_ctx) or n_ctx,
            n_head=n_head,
            n_head_kv=n_head_kv,
            head_dim_k=dim_k,
            head_dim_v=dim_v,
            head_dim_k_swa=self.width("attention.key_length_swa", dim_k),
            head_dim_v_swa=self.width("attention.value_length_swa", dim_v),
            n_swa=n_swa if any(swa) else 0,
            swa_layers=swa,
            recurrent_layers=recurrent,
            attention_layers=self.attention(memory, n_layer, n_all, n_kv, recurrent, n_ff),
            n_embd_r=self.state_r(n_embd, n_head, kda),
            n_embd_s=self.state_s(n_embd, n_head, kda, dim_k),
            memory=memory,
            memory_name=memory_name,
            rope=rope,
            n_rot=n_rot if rope != "none" else 0,
            rope_offset=max(0, dim_k - n_rot) if self.has_latent() else 0,
            rope_layers=self.rope_layers(rope, n_layer, n_all, swa),
            rope_scaling=self.rope_scaling(),
            has_rope_factors=any(t.startswith("rope_f") or ".rope_f" in t for t in tensors),
            has_long_rope=any("rope_factors_long" in t for t in tensors),
            is_mla=self.is_mla(),
            has_alibi=self.has_alibi(n_layer),
            has_learned_positions="position_embd.weight" in tensors or name in arch.LEARNED_POSITIONS,
            n_layer_kv=n_kv,
            is_causal=bool(header.get("attention.causal", True)) and memory != "none",
            file_type=self.file_type(),
            n_file_bytes=header.n_file_bytes,
            has_chat_template="tokenizer.chat_template" in header.metadata,
            n_splits=max(1, header.checked("split.count", header.metadata.get("split.count", 1))),
        )

    def vocabulary(self) -> int:
        tokens = self.header.metadata.get("tokenizer.ggml.tokens")
        if isinstance(tokens, (tuple, LongArray)):
            return len(tokens)
        return self.number("vocab_size", 0)

    def recurrent(
        self, n_layer: int, n_all: int, n_head_kv: tuple[int, ...], n_ff: tuple[int, ...]
    ) -> tuple[bool, ...]:
        name = self.name
        if name in arch.RECURRENT or name == "falcon-h1":
            return (True,) * n_all
        if name not in arch.HYBRID:
            return (False,) * n_all
        if name in ("qwen3next", "qwen35", "qwen35moe", "minimax-01"):
            given = self.per_layer("attention.recurrent_layers", n_all, ())
            if given:
                return tuple(bool(v) for v in given)
            every = max(1, self.number("full_attention_interval", 8 if name == "minimax-01" else 4))
            return tuple(il < n_layer and (il + 1) % every != 0 for il in range(n_all))
        is_ff = name in ("nemotron_h", "nemotron_h_moe")  # there a layer can be feed-forward only
        return tuple(il < n_layer and n_head_kv[il] == 0 and not (is_ff and n_ff[il]) for il in range(n_all))

    def attention(
        self,
        memory: MemoryKind,
        n_layer: int,
        n_all: int,
        n_kv: int,
        recurrent: tuple[bool, ...],
        n_ff: tuple[int, ...],
    ) -> tuple[int, ...]:
        name, layers = self.name, range(n_all)
        if memory in ("recurrent", "none"):
            return ()
        if memory not in ("hybrid", "hybrid-iswa"):
            return tuple(range(min(n_layer if n_layer > 0 else n_all, n_kv)))
        if name == "falcon-h1":  # attention and state side by side in each layer
            return tuple(layers)
        if name in ("nemotron_h", "nemotron_h_moe"):
            return tuple(il for il in layers if not recurrent[il] and n_ff[il] == 0)
        last = n_layer if name in ("qwen3next", "qwen35", "qwen35moe", "minimax-01") else n_all
        return tuple(il for il in range(last) if not recurrent[il])

    def memory(self, has_window: bool) -> tuple[MemoryKind, str]:
        name = self.name
        if name in arch.ENCODER or name in arch.DIFFUSION:
            return "none", ""
        if name in arch.RECURRENT:
            return "recurrent", ""
        if name in arch.SPECIAL_MEMORY and not (
            name == "hy_v4" and self.number("attention.indexer.top_k", 0) == 0
        ):
            return "special", arch.SPECIAL_MEMORY[name]
        if name in arch.HYBRID:
            return ("hybrid-iswa" if has_window else "hybrid"), ""
        return ("iswa" if has_window else "kv"), ""

    def rope(self) -> RopeKind:
        name = self.name
        if name in arch.LEARNED_POSITIONS or name in arch.NO_ROPE:
            return "none"
        if name in arch.MROPE_IF_SECTIONS:
            sections = self.header.get("rope.dimension_sections")
            if isinstance(sections, tuple) and len(sections) > 1 and sections[0] > 0 and sections[1] > 0:
                return "mrope"
        if name in arch.MROPE:
            return "mrope"
        if name in arch.IMROPE:
            return "imrope"
        return "norm" if name in arch.NORM else "neox"

    def rope_layers(
        self, rope: RopeKind, n_layer: int, n_all: int, swa: tuple[bool, ...]
    ) -> tuple[bool, ...]:
        name, layers = self.name, range(n_all)
        if rope == "none":
            return (False,) * n_all
        if name in ("granite", "granitehybrid", "graniteswitch"):
            return (bool(self.header.get("rope.scaling.finetuned", True)),) * n_all
        if name == "granite_swa":
            return tuple(bool(v) for v in self.per_layer("attention.rope_pattern", n_all, (1,) * n_all))
        if name in ("cohere2", "exaone-moe", "maple", "muse-glimmer"):
            return swa
        if name == "cohere2moe":
            dense = self.number("leading_dense_block_count", 0)
            return tuple(swa[il] or il < dense for il in layers)
        if name == "exaone4":
            return tuple(swa[il] or not any(swa) for il in layers)
        if name in ("smollm3", "afmoe"):
            return tuple((il + 1) % 4 != 0 for il in layers)
        if name == "llama4":
            step = 4 if any(swa) else max(1, n_layer)
            return tuple((il + 1) % step != 0 for il in layers)
        if name == "smallthinker" and any(swa):
            return tuple(il % 4 != 0 for il in layers)
        return (True,) * n_all

    def rope_scaling(self) -> str:
        if self.header.get("rope.scaling.factor", self.header.get("rope.scale_linear")):
            return str(self.header.get("rope.scaling.type", "linear"))
        return str(self.header.get("rope.scaling.type", "none"))

    def has_latent(self) -> bool:
        """Does the rotated part of a key stand behind a part that is not rotated?"""
        return self.header.get("attention.kv_lora_rank") is not None and self.name in arch.LATENT

    def is_mla(self) -> bool:
        return (
            self.has_latent()
            and self.number("attention.key_length_mla", 0) > 0
            and self.number("attention.value_length_mla", 0) > 0
        )

    def has_alibi(self, n_layer: int) -> bool:
        if self.name in arch.ALIBI_ALWAYS or (self.name == "baichuan" and n_layer == 40):
            return True
        bias = self.header.get("attention.max_alibi_bias", 0.0)
        return self.name in ("mpt", "jais") and isinstance(bias, (int, float)) and bias > 0.0

    def state_r(self, n_embd: int, n_head: tuple[int, ...], kda: int) -> int:
        if self.number("wkv.head_size", 0):
            return self.number("token_shift_count", 2) * n_embd
        if conv := self.number("shortconv.l_cache", 0):
            return n_embd * (conv - 1)
        d_conv = self.number("ssm.conv_kernel", 0)
        if kda:
            return 3 * (d_conv - 1 if d_conv else 3) * n_head[0] * kda
        inner, groups = self.number("ssm.inner_size", 0), self.number("ssm.group_count", 0)
        return max(0, d_conv - 1) * (inner + 2 * groups * self.number("ssm.state_size", 0))

    def state_s(self, n_embd: int, n_head: tuple[int, ...], kda: int, dim_k: int) -> int:
        if head := self.number("wkv.head_size", 0):
            return n_embd * head
        if kda:
            return kda * kda * n_head[0]
        if self.name == "minimax-01":
            return dim_k * dim_k * n_head[0]
        return self.number("ssm.state_size", 0) * self.number("ssm.inner_size", 0)

    def file_type(self) -> str:
        sizes: dict[str, int] = {}
        for tensor in self.header.tensors.values():
            sizes[tensor.type_name] = sizes.get(tensor.type_name, 0) + tensor.n_bytes
        return " ".join(sorted(sizes, key=lambda name: (-sizes[name], name))).lower()

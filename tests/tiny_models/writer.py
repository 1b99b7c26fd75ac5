"""Collects sizes, metadata and random tensors of one tiny model, and writes them as GGUF."""

from __future__ import annotations

import zlib
from pathlib import Path

import gguf
import numpy as np

NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6


class Tiny:
    """One model being written. Weights are float32, drawn from a stream of their own name."""

    def __init__(
        self,
        path: Path,
        *,
        n_layer: int,
        n_ctx_train: int,
        seed: int,
        n_head: int = 4,
        n_head_kv: int = 2,
        head_dim: int = 64,
        n_ff: int = 128,
        n_swa: int = 32,
        chat_template: str | None = None,
    ) -> None:
        self.path = path
        self.n_layer, self.n_ctx_train, self.seed = n_layer, n_ctx_train, seed
        self.n_head, self.n_head_kv, self.head_dim = n_head, n_head_kv, head_dim
        self.n_ff, self.n_swa = n_ff, n_swa
        self.n_embd = n_head * head_dim
        self.chat_template = chat_template
        self.vocab = vocabulary()
        self.n_vocab = len(self.vocab)
        self.keys: dict[str, object] = {}
        self.tensors: dict[str, np.ndarray] = {}
        self.arch = ""

    def begin(self, arch: str, *, rms: bool = True, heads: bool = True) -> None:
        """Set the metadata that nearly every architecture has."""
        self.arch = arch
        self.set("context_length", self.n_ctx_train)
        self.set("embedding_length", self.n_embd)
        self.set("block_count", self.n_layer)
        self.set("feed_forward_length", self.n_ff)
        if heads:
            self.set("attention.head_count", self.n_head)
            self.set("attention.head_count_kv", self.n_head_kv)
        self.set(f"attention.layer_norm_{'rms_' if rms else ''}epsilon", 1e-5)

    def set(self, key: str, value: object) -> None:
        self.keys[f"{self.arch}.{key}"] = value

    def matrix(self, name: str, n_in: int, *n_out: int, gain: float = 1.0) -> None:
        """A weight that keeps its input's variance, times gain squared; ggml's order is [n_in, n_out]."""
        self.normal(name, (*reversed(n_out), n_in), gain / np.sqrt(n_in))

    def normal(self, name: str, shape: tuple[int, ...], stdev: float, mean: float = 0.0) -> None:
        draw = np.random.default_rng([self.seed, zlib.crc32(name.encode())])
        self.tensors[name] = (mean + stdev * draw.standard_normal(shape)).astype(np.float32)

    def norm(self, name: str, n: int, *, bias: bool = False) -> None:
        """A normalisation's weights, near 1, and its bias, near 0."""
        self.normal(f"{name}.weight", (n,), 0.1, 1.0)
        if bias:
            self.bias(name, n)

    def bias(self, name: str, n: int) -> None:
        self.normal(f"{name}.bias", (n,), 0.1)

    def value(self, name: str, array: np.ndarray) -> None:
        self.tensors[name] = array.astype(np.float32)

    def write(self) -> None:
        out = gguf.GGUFWriter(self.path, self.arch)
        out.add_name(f"tiny {self.arch}")
        for key, value in self.keys.items():
            if isinstance(value, bool):
                out.add_bool(key, value)
            elif isinstance(value, int):
                out.add_uint32(key, value)
            elif isinstance(value, float):
                out.add_float32(key, value)
            elif isinstance(value, str):
                out.add_string(key, value)
            else:
                out.add_array(key, value)
        out.add_tokenizer_model("llama")
        out.add_token_list([text for text, _ in self.vocab])
        out.add_token_scores([-float(i) for i in range(self.n_vocab)])
        out.add_token_types([kind for _, kind in self.vocab])
        out.add_bos_token_id(1)
        out.add_eos_token_id(2)
        out.add_unk_token_id(0)
        out.add_add_bos_token(True)
        out.add_add_eos_token(False)
        out.add_add_space_prefix(False)
        if self.arch == "bert":
            out.add_token_type_count(2)
        if self.chat_template is not None:
            out.add_chat_template(self.chat_template)
        for name, array in self.tensors.items():
            out.add_tensor(name, array)
        out.write_header_to_file()
        out.write_kv_data_to_file()
        out.write_tensors_to_file()
        out.close()


def vocabulary() -> list[tuple[str, int]]:
    """One token per byte, the space, BOS and EOS, and three markers: 263 in all."""
    tokens = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL)]
    tokens += [(f"<0x{byte:02X}>", BYTE) for byte in range(256)]
    tokens += [("\u2581", NORMAL)]
    tokens += [(text, CONTROL) for text in ("<|im_start|>", "<|im_end|>", "<|endoftext|>")]
    return tokens

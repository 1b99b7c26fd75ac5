"""Opens a model and makes a context, with errors that give the native reason."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from h2o_gguf.errors import H2OError, ModelFileError, NativeError, OptionError, OutOfMemoryError
from h2o_gguf.native import C, high, native_log
from h2o_gguf.options import KV_TYPES

__all__ = [
    "ModelOptions",
    "check_kv_types",
    "context_params",
    "default_threads",
    "load_adapter",
    "make_context",
    "open_model",
]

UNQUANTIZED = {0, 1, 30}
ALL_LAYERS = 0x7FFFFFFF
NO_MEMORY = ("failed to allocate", "unable to allocate", "insufficient memory", "bad_alloc")  # in its log


def default_threads() -> int:
    """Physical cores this process may use; all CPUs where that is unknown."""
    try:
        cpus = os.sched_getaffinity(0)
    except AttributeError:
        return os.cpu_count() or 1
    cores = set()
    for cpu in cpus:
        path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        try:
            cores.add(path.read_text().strip())
        except OSError:
            return len(cpus)
    return len(cores) or 1


def check_kv_types(type_k: int, type_v: int, flash_attn: bool) -> None:
    """Raise OptionError for types llama.cpp would refuse with a null context."""
    if type_v not in UNQUANTIZED and not flash_attn:
        name = next(name for name, number in KV_TYPES.items() if number == type_v)
        raise OptionError(
            f"type_v {name} is quantized and needs flash attention, but flash_attn is off: "
            "set flash_attn=True, or type_v to f16",
            "type_v",
            "flash_attn",
        )


class ModelOptions:
    """llama_model_params from keyword arguments named as llama-cpp-python names them.

    Keeps the arrays alive that the parameters point to.
    """

    def __init__(
        self,
        *,
        n_gpu_layers: int = 0,
        split_mode: int = C.LLAMA_SPLIT_MODE_LAYER,
        main_gpu: int = 0,
        tensor_split: Sequence[float] | None = None,
        vocab_only: bool = False,
        use_mmap: bool = True,
        use_mlock: bool = False,
        kv_overrides: Mapping[str, bool | int | float | str] | None = None,
    ) -> None:
        self.params: Any = C.llama_model_default_params()
        self.params.n_gpu_layers = ALL_LAYERS if n_gpu_layers < 0 else n_gpu_layers
        self.params.split_mode = split_mode
        self.params.main_gpu = main_gpu
        self.params.vocab_only = vocab_only
        if use_mlock:
            mode = C.LLAMA_LOAD_MODE_MMAP_MLOCK if use_mmap else C.LLAMA_LOAD_MODE_MLOCK
        else:
            mode = C.LLAMA_LOAD_MODE_MMAP if use_mmap else C.LLAMA_LOAD_MODE_NONE
        self.params.load_mode = mode
        self._tensor_split = self._overrides = None
        if tensor_split is not None:
            self._set_tensor_split(tensor_split)
        if kv_overrides:
            self._set_overrides(kv_overrides)

    def _set_tensor_split(self, shares: Sequence[float]) -> None:
        if len(shares) > C.LLAMA_MAX_DEVICES:
            raise OptionError(
                f"tensor_split has {len(shares)} shares, the most is {C.LLAMA_MAX_DEVICES}",
                "tensor_split",
            )
        self._tensor_split = (ctypes.c_float * C.LLAMA_MAX_DEVICES)(*shares)
        self.params.tensor_split = self._tensor_split

    def _set_overrides(self, overrides: Mapping[str, bool | int | float | str]) -> None:
        array = (C.llama_model_kv_override * (len(overrides) + 1))()  # ends with an empty key
        for item, (key, value) in zip(array, overrides.items(), strict=False):
            item.key = key.encode()
            if isinstance(value, bool):
                item.tag, item.value.val_bool = C.LLAMA_KV_OVERRIDE_TYPE_BOOL, value
            elif isinstance(value, int):
                item.tag, item.value.val_i64 = C.LLAMA_KV_OVERRIDE_TYPE_INT, value
            elif isinstance(value, float):
                item.tag, item.value.val_f64 = C.LLAMA_KV_OVERRIDE_TYPE_FLOAT, value
            else:
                item.tag, item.value.val_str = C.LLAMA_KV_OVERRIDE_TYPE_STR, value.encode()
        self._overrides = array
        self.params.kv_overrides = array


class _FileName(str):
    """A file's name as llama-cpp-python takes it, with the bytes it has on disk, UTF-8 or not."""

    def encode(self, *_: Any) -> bytes:
        return os.fsencode(str(self))


def open_model(path: str, options: ModelOptions) -> Any:
    """Return llama-cpp-python's LlamaModel.  Raises ModelFileError with the native reason."""
    C.llama_backend_init()
    with native_log() as log:
        # Asked between tensors whether to go on; its value lives as long as the call.
        goes_on = C.llama_progress_callback(lambda _progress, _data: not log.is_interrupted)
        options.params.progress_callback = goes_on
        try:
            # verbose here only means that stdout and stderr are left alone while native code runs.
            return high.llama.internals.LlamaModel(
                path_model=_FileName(path), params=options.params, verbose=True
            )
        except ValueError as error:
            raise ModelFileError(path, log.reason(str(error))) from error


def make_context(model: Any, params: Any, layer_cells: Sequence[int] = ()) -> Any:
    """Return llama-cpp-python's LlamaContext.

    layer_cells : rows of the cache of each model layer, 0 is n_ctx; empty: all layers have n_ctx.

    Raises: NativeError, OutOfMemoryError with the reason; UnsupportedModelError, layers cannot differ.
    """
    with native_log() as log:
        try:
            with _cells_by_layer(model, layer_cells):
                return high.llama.internals.LlamaContext(model=model, params=params, verbose=True)
        except H2OError:
            raise
        except ValueError as error:
            reason = log.reason(str(error))
            text = f"llama.cpp cannot make a context: {reason}"
            if any(word in reason for word in NO_MEMORY):
                raise OutOfMemoryError(f"{text}: lower n_ctx or kv_budget") from error
            raise NativeError(text) from error


@contextlib.contextmanager
def _cells_by_layer(model: Any, layer_cells: Sequence[int]) -> Iterator[None]:
    """What contexts that are made inside give each layer; afterwards all layers are alike again."""
    if not layer_cells:
        yield
        return
    from h2o_gguf.bindings import set_layer_cells

    address = int(ctypes.cast(model.model, ctypes.c_void_p).value or 0)
    set_layer_cells(address, layer_cells)
    try:
        yield
    finally:
        set_layer_cells(address, ())


def context_params(
    *,
    n_cells: int,
    n_ubatch: int,
    n_threads: int,
    n_threads_batch: int,
    type_k: int,
    type_v: int,
    flash_attn: bool,
    embedding: bool = False,
    offload_kqv: bool = True,
    op_offload: bool | None = None,
    swa_full: bool | None = False,
    no_perf: bool = False,
    **rope: Any,
) -> Any:
    """Return llama_context_params.

    swa_full : windowed layers get as many cells as the others; False: they keep their window.
    rope : RoPE, YaRN, pooling, attention, by llama.cpp's names.
    """
    params = C.llama_context_default_params()
    params.n_ctx = n_cells
    params.n_batch = params.n_ubatch = n_ubatch
    params.n_threads, params.n_threads_batch = n_threads, n_threads_batch
    params.type_k, params.type_v = type_k, type_v
    params.flash_attn_type = (
        C.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash_attn else C.LLAMA_FLASH_ATTN_TYPE_DISABLED
    )
    params.embeddings = embedding
    params.offload_kqv = offload_kqv
    params.no_perf = no_perf
    if op_offload is not None:
        params.op_offload = op_offload
    params.swa_full = bool(swa_full)
    for name, value in rope.items():
        if value is not None:
            setattr(params, name, value)
    if embedding:
        params.n_seq_max = min(n_ubatch, int(C.llama_max_parallel_sequences()))
        params.kv_unified = True
    return params


def load_adapter(model: Any, ctx: Any, path: str, scale: float) -> Any:
    """Apply a LoRA adapter; return it, to be freed with the model.  Raises ModelFileError."""
    with native_log() as log:
        adapter = C.llama_adapter_lora_init(model, os.fsencode(path))
        if not adapter:
            raise ModelFileError(path, log.reason("llama.cpp cannot read the adapter"))
        adapters = (C.llama_adapter_lora_p_ctypes * 1)(adapter)
        if C.llama_set_adapters_lora(ctx, adapters, 1, (ctypes.c_float * 1)(scale)) != 0:
            C.llama_adapter_lora_free(adapter)
            raise ModelFileError(path, log.reason("llama.cpp cannot apply the adapter"))
    return adapter

"""`llama_cpp.Llama` with a KV cache that stays inside a budget."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import random
import threading
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from typing_extensions import Unpack

from h2o_gguf import loading
from h2o_gguf.attaching import attach, open_attic
from h2o_gguf.attic import LIMIT, AtticOptions
from h2o_gguf.cache_options import CacheOptions
from h2o_gguf.cancel import CancelToken
from h2o_gguf.checked import checked
from h2o_gguf.completions import Completions
from h2o_gguf.context import Context
from h2o_gguf.engine import Engine
from h2o_gguf.errors import ClosedError, OptionError, UnsupportedModelError
from h2o_gguf.eviction import NativeCache
from h2o_gguf.fingerprint import fingerprint
from h2o_gguf.host_memory import require_bytes
from h2o_gguf.kinds import Callback, Count, Int32, Integer, Number, Path, Switch, Text
from h2o_gguf.layer_budgets import read_layer_budgets
from h2o_gguf.lock import CallLock, Gone
from h2o_gguf.logit_rows import LogitRows
from h2o_gguf.lowlevel import LowLevel
from h2o_gguf.models import cannot_generate, memory_bytes, query_bytes, read_header, shape_of
from h2o_gguf.models.catalog import refuse_name
from h2o_gguf.native import C, high, native_log
from h2o_gguf.options import (
    KV_TYPES,
    Attention,
    AtticBytes,
    AtticPlace,
    BatchSize,
    CacheType,
    ContextKeywords,
    ContextSize,
    GpuLayers,
    Granularity,
    LayerBudgetsChoice,
    LlamaKeywords,
    ModelKeywords,
    Numa,
    PenaltyWindow,
    Pin,
    PolicyChoice,
    Threads,
    Tokenizer,
)
from h2o_gguf.protocols import UNBOUNDED
from h2o_gguf.sessions import Sessions
from h2o_gguf.sizes import Sizes, plan_model_sizes, plan_sizes
from h2o_gguf.templates import chat_handlers, check_format, guess_format, template_names
from h2o_gguf.vocab import NO_TOKEN, Vocab

__all__ = ["H2OLlama"]

logger = logging.getLogger(__name__)

RANDOM_SEED = 0xFFFFFFFF  # llama.cpp's mark for "choose one"

_alive: weakref.WeakSet[H2OLlama] = weakref.WeakSet()


class H2OLlama(LowLevel, Completions, Sessions, high.Llama):  # type: ignore[misc]
    """A GGUF model with the API of `llama_cpp.Llama` and a KV cache that never outgrows its budget.

    model_path : the GGUF file.
    policy : who is evicted when the cache is full: a name, an object with budget and victims(view, n), or
        None or "none" for nobody.
    kv_budget : entries per KV head after an eviction. heavy_ratio, recent_ratio : the same, as shares of
        n_ctx. Without any of them the budget is n_ctx, as far as the model's positions go.
    layer_budgets : budgets that differ by layer: a list, one for each layer that is evicted from; "pyramid",
        "pyramid:BETA" or the file of a calibration, which split kv_budget. See layer_budgets.py.
    n_sink, n_recent : entries that are never evicted; None: the policy's default.
    pin : what is never evicted either: "system" for the system message of a chat, or spans of positions.
    granularity : who shares one list of victims: "head", "layer" or "token".
    kv_block : entries evicted at once while generating, >= 1; fewer where positions are scarce. 1 is the
        papers' one at a time.
    attic : where evicted entries stay, to be fetched back by what is read and attends to them: "ram", "disk"
        (a file that ends with the process), or "off": they are lost. recall_every : generated tokens after
        which they are fetched back too; 0: only by what is read; None: as often as costs little.
        attic_limit : bytes of them, beyond which the least-scored are dropped; None: 1 GiB. attic_type : what
        they are kept as, as type_k takes it; None: the cache's own types.
    attention : how scores are computed: "auto", "fused", "composed" or "reference".
    n_ctx : 0 is the model's context. Without eviction the longest sequence; with eviction sequences have no
        end, and this is the window of positions that is used.
    n_batch, n_ubatch : tokens computed at once; the smaller counts.
    n_threads : 0 or None is the physical cores.
    type_k, type_v : llama.cpp's numbers, or names such as "q8_0".
    seed : of this object's generations; None or -1: a new one each time.

    embedding : embed texts. Unlike `llama_cpp.Llama`, such an object has no KV cache of one sequence to keep
        inside a budget and cannot generate: make a second one for that.

    All other options are `llama_cpp.Llama`'s. One call at a time: threads wait for each other.

    Raises: ModelFileError with the native reason; UnsupportedModelError; OptionError; BudgetError;
        OutOfMemoryError.
    """

    @checked
    def __init__(
        self,
        model_path: Path,
        *,
        policy: PolicyChoice | None = "h2o+",
        kv_budget: Int32 | None = None,
        heavy_ratio: Number | None = None,
        recent_ratio: Number | None = None,
        n_sink: Int32 | None = None,
        n_recent: Int32 | None = None,
        layer_budgets: LayerBudgetsChoice | None = None,
        pin: Pin | None = None,
        granularity: Granularity | None = None,
        kv_block: BatchSize = 64,
        attic: AtticPlace = "off",
        attic_limit: AtticBytes | None = None,
        attic_type: CacheType | None = None,
        recall_every: Count | None = None,
        attention: Attention = "auto",
        n_ctx: ContextSize = 0,
        n_batch: BatchSize | None = None,
        n_ubatch: BatchSize | None = None,
        n_threads: Threads | None = None,
        n_threads_batch: Threads | None = None,
        n_gpu_layers: GpuLayers = 0,
        flash_attn: Switch = True,
        type_k: CacheType | None = None,
        type_v: CacheType | None = None,
        seed: Integer | None = None,
        logits_all: Switch = False,
        embedding: Switch = False,
        last_n_tokens_size: PenaltyWindow = 64,
        chat_format: Text | None = None,
        chat_handler: Callback | None = None,
        draft_model: Callback | None = None,
        tokenizer: Tokenizer | None = None,
        lora_base: Path | None = None,
        lora_scale: Number = 1.0,
        lora_path: Path | None = None,
        numa: Numa = False,
        spm_infill: Switch = False,
        verbose: Switch = False,
        **options: Unpack[LlamaKeywords],
    ) -> None:
        given = {
            name: value for name, value in locals().items() if name not in ("self", "options", "__class__")
        }
        self._given = {**given, **options}
        self._closed = True
        self._stack = ExitStack()
        self._engine: Engine | None = None
        self._pin = pin if pin is None or pin == "system" else tuple(pin)
        cache_options = CacheOptions(
            policy=policy, kv_budget=kv_budget, heavy_ratio=heavy_ratio, recent_ratio=recent_ratio,
            n_sink=n_sink, n_recent=n_recent, granularity=granularity, kv_block=kv_block,
            n_ctx=n_ctx, n_batch=n_batch, n_ubatch=n_ubatch,
        )  # fmt: skip
        self.verbose = verbose
        self.model_path = str(model_path)
        self.spm_infill, self.draft_model = spm_infill, draft_model
        self.lora_base, self.lora_scale, self.lora_path = lora_base, lora_scale, lora_path
        self.last_n_tokens_size = last_n_tokens_size
        self.kv_overrides = options.get("kv_overrides")
        self.tensor_split = options.get("tensor_split")
        self.cache: Any = None
        self._logits_all = logits_all
        self._lock = CallLock("this H2OLlama")
        self._running: CancelToken | None = None
        self._chat = threading.local()
        self._rows = LogitRows(0)
        self.set_seed(seed)
        self.n_threads = n_threads or loading.default_threads()
        self.n_threads_batch = n_threads_batch or self.n_threads
        self.numa = int(numa)
        k, v = (int(KV_TYPES["f16"] if number is None else number) for number in (type_k, type_v))
        loading.check_kv_types(k, v, flash_attn)
        model_options = loading.ModelOptions(n_gpu_layers=n_gpu_layers, **_chosen(ModelKeywords, options))
        self.model_params = model_options.params
        self._model_options = model_options  # owns arrays the parameters point to
        refuse_name(self.model_path)
        header = read_header(self.model_path)
        if chat_format is not None and chat_handler is None:
            check_format(chat_format, template_names(header.metadata))
        shape = shape_of(header)
        if layer_budgets is not None:
            budgets = read_layer_budgets(layer_budgets, self.model_path)
            cache_options = replace(cache_options, layer_budgets=budgets)
        sizes = self._sizes(cache_options, shape, is_bounded=embedding, has_attic=attic != "off")
        kept_as = None if attic_type is None else int(attic_type)
        attic_options = AtticOptions(attic, attic_limit or LIMIT, kept_as, recall_every)
        self._no_engine = self._why_no_engine(shape, embedding, model_options.params.vocab_only)
        self._fingerprint = fingerprint(self.model_path)
        names = {number: name for name, number in KV_TYPES.items()}
        memory = memory_bytes(
            shape, sizes.n_cells, sizes.n_ubatch, names[k], names[v],
            flash_attn=flash_attn, swa_full=bool(options.get("swa_full")), layer_cells=sizes.layer_cells,
        )  # fmt: skip
        if n_gpu_layers == 0 and not self.model_params.vocab_only:
            n_bytes = memory.total
            if sizes.policy is not None:
                n_bytes += query_bytes(shape, sizes.policy.n_observed)
            require_bytes(n_bytes, sizes.n_cells, has_budget=sizes.policy is not None)
        high._logger.set_verbose(verbose)
        with ExitStack() as undo:
            undo.callback(self._stack.close)
            if self.numa:
                C.llama_numa_init(self.numa)
            self._model = loading.open_model(self.model_path, model_options)
            self._stack.callback(self._model.close)
            self._vocab = Vocab(self._model.model)
            self._describe(tokenizer, chat_format, chat_handler)
            if not model_options.params.vocab_only:
                self.context_params = loading.context_params(
                    n_cells=sizes.n_cells, n_ubatch=sizes.n_ubatch, n_threads=self.n_threads,
                    n_threads_batch=self.n_threads_batch, type_k=k, type_v=v, flash_attn=flash_attn,
                    embedding=embedding, **_chosen(ContextKeywords, options),
                )  # fmt: skip
                self._open_context(sizes, memory.kv, attention, attic_options)
            undo.pop_all()
        self._closed = False
        _alive.add(self)

    # -- construction ---------------------------------------------------------------------------------

    @staticmethod
    def _why_no_engine(shape: Any, embedding: bool, vocab_only: bool) -> str:
        """Why the object cannot generate; "" where it can."""
        if embedding or vocab_only:
            option = "embedding" if embedding else "vocab_only"
            return f"it was made with {option}=True; make another one without it"
        reason = cannot_generate(shape)
        hint = "embed texts with embedding=True, or use another model"
        return f"this is a {shape.architecture!r} model: {reason}; {hint}" if reason else ""

    def _sizes(self, options: CacheOptions, shape: Any, *, is_bounded: bool, has_attic: bool) -> Sizes:
        """The sizes; a model that cannot be evicted from is refused only if eviction was asked for."""
        if is_bounded:
            return plan_sizes(
                CacheOptions(None, n_ctx=options.n_ctx, n_batch=options.n_batch), shape.n_ctx_train
            )
        try:
            return plan_model_sizes(options, shape)
        except UnsupportedModelError as error:
            if has_attic or not options.is_default:
                raise
            logger.warning("%s: nothing will be evicted: %s", self.model_path, error.reason)
        plain = CacheOptions(None, n_ctx=options.n_ctx, n_batch=options.n_batch, n_ubatch=options.n_ubatch)
        return plan_sizes(plain, shape.n_ctx_train)

    def _describe(self, tokenizer: Any, chat_format: str | None, chat_handler: Any) -> None:
        """Set what users and chat handlers read about the model."""
        self.tokenizer_ = tokenizer or high.LlamaTokenizer(self)
        self._own_tokenizer = tokenizer is None
        self._n_vocab = self._vocab.n_tokens
        self._rows = LogitRows(self._n_vocab)
        self._token_nl, self._token_eos = self.token_nl(), self.token_eos()
        self.metadata: dict[str, str] = self._model.metadata()
        texts = [
            "" if token == NO_TOKEN else self._model.token_get_text(token)
            for token in (self.token_bos(), self.token_eos())
        ]
        self._chat_handlers = chat_handlers(self.metadata, texts[0], texts[1], self.token_eos())
        self.chat_handler = chat_handler
        self.chat_format = chat_format
        if chat_format is None and chat_handler is None:
            self.chat_format = guess_format(self.metadata)
        self._is_recurrent = bool(C.llama_model_is_recurrent(self._model.model))
        self._is_hybrid = bool(C.llama_model_is_hybrid(self._model.model))

    def _open_context(self, sizes: Sizes, kv_bytes: int, attention: str, attic_options: AtticOptions) -> None:
        self.n_batch = sizes.n_ubatch
        self._ctx = self.make_context(self.context_params, self._stack, sizes.layer_cells)
        if self.context_params.embeddings:
            self._batch = high.llama.internals.LlamaBatch(
                n_tokens=self.n_batch, embd=0, n_seq_max=self.context_params.n_seq_max, verbose=self.verbose
            )
            self._stack.callback(self._batch.close)
            self._n_ctx = sizes.n_ctx
            return
        if self._no_engine:
            return
        cache: NativeCache | None = None
        n_ctx = sizes.n_ctx
        if sizes.policy is not None:
            with native_log():
                cache = attach(Context.address_of(self._ctx.ctx), sizes.policy, sizes, attention)
            n_ctx = UNBOUNDED if sizes.can_renumber else sizes.n_pos_max
        context = Context(self._ctx.ctx, self._model.model)
        weights = int(C.llama_model_size(self._model.model))
        attic = open_attic(
            cache,
            sizes.policy,
            attic_options,
            weights,
            attention=attention,
            can_take_back=not (self._is_recurrent or self._is_hybrid),
        )
        self._engine = Engine(
            context, None, sizes.policy, n_ctx=n_ctx, cache=cache, kv_bytes=kv_bytes, attic=attic
        )
        self._stack.callback(self._engine.close)
        self._n_ctx = n_ctx
        if self._logits_all:
            self._engine.on_logits = lambda start, rows: self._rows.put(start, rows)

    def make_context(self, params: Any, stack: ExitStack, layer_cells: Sequence[int] = ()) -> Any:
        """Return a llama_cpp context of this model and its adapter, freed with the stack.

        params, layer_cells : as loading.make_context takes them.

        Raises: NativeError, OutOfMemoryError, ModelFileError, UnsupportedModelError.
        """
        context = loading.make_context(self._model, params, layer_cells)
        stack.callback(context.close)
        if self.lora_path:
            adapter = loading.load_adapter(
                self._model.model, context.ctx, str(self.lora_path), self.lora_scale
            )
            stack.callback(C.llama_adapter_lora_free, adapter)
        return context

    # -- life -----------------------------------------------------------------------------------------

    def close(self) -> None:
        """Free the model; may be called twice. A running call of another thread is cancelled first."""
        if getattr(self, "_closed", True):
            return
        self._lock.refuse_inside("close")
        self._closed = True
        self.cancel()
        with self._lock.last_call():
            self._stack.close()
        self._engine = None
        # Native pointers are gone: whatever still asks for them gets an error instead of a crash.
        gone: Any = Gone("this H2OLlama")
        self._model = self._ctx = self._vocab = self.tokenizer_ = gone
        _alive.discard(self)

    def __enter__(self) -> H2OLlama:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # at interpreter exit modules may be gone
            self.close()

    def __getstate__(self) -> dict[str, Any]:
        """What a copy in another process is made with; the sequence stays here."""
        return dict(self._given)

    def __setstate__(self, given: dict[str, Any]) -> None:
        self.__init__(**given)  # type: ignore[misc]

    @functools.wraps(high.Llama.embed, assigned=())
    def embed(self, *args: Any, **kwargs: Any) -> Any:
        """Embed texts; needs embedding=True.  Parameters and result are llama_cpp.Llama.embed's."""
        if self._closed:
            raise ClosedError("this H2OLlama")
        if not self.context_params.embeddings:
            raise OptionError("embeddings need a model made with embedding=True", "embedding")
        with self._call():
            return high.Llama.embed(self, *args, **kwargs)

    def __repr__(self) -> str:
        return f"H2OLlama({self.model_path!r}{', closed' if self._closed else ''})"

    # -- facts ----------------------------------------------------------------------------------------

    def n_ctx(self) -> int:
        """Most tokens of a sequence: 2**31 - 1 where it has no end."""
        return int(getattr(self, "_n_ctx", 0)) or int(self._model.n_ctx_train())

    def detokenize(
        self, tokens: Sequence[int], prev_tokens: Sequence[int] | None = None, special: bool = False
    ) -> bytes:
        """The bytes that tokens spell; control tokens only when `special`."""
        if not self._own_tokenizer:
            return bytes(self.tokenizer_.detokenize(tokens, prev_tokens=prev_tokens, special=special))
        text = b"".join(self._vocab.piece(int(token), special) for token in tokens)
        # SentencePiece models write a space before the first word.
        leads = len(tokens) > 0 and tokens[0] == self._vocab.bos and text[:1] == b" "
        return text[1:] if leads else text

    @checked
    def set_seed(self, seed: Integer | None) -> None:
        """Seed this object's next generations; None or -1: a new seed each time."""
        is_random = seed is None or seed < 0 or seed == RANDOM_SEED
        self._seed = RANDOM_SEED if is_random or seed is None else seed
        self._rng = random.Random(None if is_random else seed)

    def _next_seed(self) -> int:
        return self._rng.getrandbits(32) % RANDOM_SEED


def _chosen(keywords: Any, options: Any) -> dict[str, Any]:
    """Those of the options that a TypedDict names."""
    return {name: value for name, value in options.items() if name in keywords.__annotations__}


@atexit.register
def _close_all() -> None:
    """Free every model while the interpreter is still whole."""
    for llama in list(_alive):
        llama.close()

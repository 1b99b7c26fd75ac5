"""Completions and chats of `llama_cpp.Llama`, with our cache underneath."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from pydantic import InstanceOf

from h2o_gguf.cancel import CancelToken
from h2o_gguf.checked import checked
from h2o_gguf.completion import Outcome, Piece, Request, Response, complete
from h2o_gguf.drafts import Draft
from h2o_gguf.engine import Engine
from h2o_gguf.errors import ContextOverflowError, OptionError
from h2o_gguf.kinds import Callback, Count, Int32, Integer, Number, Spans, Switch, Text, Texts
from h2o_gguf.lock import Turn
from h2o_gguf.messages import check_choice
from h2o_gguf.native import high
from h2o_gguf.options import (
    Bias,
    FunctionCall,
    Functions,
    Grammar,
    Messages,
    Mirostat,
    Processors,
    Prompt,
    RepeatPenalty,
    ResponseFormat,
    ToolChoice,
    Tools,
)
from h2o_gguf.pins import Span
from h2o_gguf.prompt import completion_tokens, find_text, has_infill, one_bos
from h2o_gguf.report import KVReport
from h2o_gguf.sampling import SamplingOptions
from h2o_gguf.templates import check_format
from h2o_gguf.vocab import Vocab

__all__ = ["Completions"]

logger = logging.getLogger(__name__)

SYSTEM_HEAD_MAX = 64  # tokens; a system message that begins later is not the head of the prompt


class Completions:
    """create_completion, create_chat_completion and their kin."""

    cache: Any
    chat_format: str | None
    chat_handler: Any
    model_path: str
    _chat_handlers: Mapping[str, Any]
    spm_infill: bool
    _chat: threading.local
    _pin: str | tuple[Span, ...] | None
    _vocab: Vocab

    def kv_report(self) -> KVReport:
        """The state of the KV cache."""
        return self.engine.report()

    @checked
    def create_completion(
        self,
        prompt: Prompt,
        suffix: Text | None = None,
        max_tokens: Integer | None = None,
        temperature: Number = 0.8,
        top_p: Number = 0.95,
        min_p: Number = 0.05,
        typical_p: Number = 1.0,
        logprobs: Count | None = None,
        echo: Switch = False,
        stop: Texts | None = None,
        frequency_penalty: Number = 0.0,
        presence_penalty: Number = 0.0,
        repeat_penalty: RepeatPenalty = 1.0,
        top_k: Int32 = 40,
        stream: Switch = False,
        seed: Integer | None = None,
        tfs_z: Number = 1.0,
        mirostat_mode: Mirostat = 0,
        mirostat_tau: Number = 5.0,
        mirostat_eta: Number = 0.1,
        model: Text | None = None,
        stopping_criteria: Callback | None = None,
        logits_processor: Processors | None = None,
        grammar: Grammar | None = None,
        logit_bias: Bias | None = None,
        *,
        pin: Spans | None = None,
        progress: Callback | None = None,
        cancel: InstanceOf[CancelToken] | None = None,
    ) -> Any:
        """Continue a text; return an OpenAI-shaped result with a `kv` entry, or an iterator of chunks.

        Parameters are llama_cpp.Llama.create_completion's, except:

        max_tokens : None, 0 or -1 generates until the model ends; in a context without end, at most as many
            tokens as the model was trained on.
        stop : the stop that begins earliest in the text wins.
        logprobs : needs no logits_all.
        grammar : a LlamaGrammar, or GBNF text.
        logit_bias : keys may be digits, as in JSON.
        pin : spans of the prompt, in tokens, that are never evicted, beside those of the constructor.
        progress : called with (tokens read, tokens to read) after each batch of the prompt.

        cancel : stops the call as the method cancel() does; finish_reason is "cancelled" then.
        A stream holds the object until it ends or is closed.

        Raises: ContextOverflowError, the prompt does not fit and nothing may be evicted; BudgetError, pinned
            spans do not fit the budget; OptionError; PolicyError. The object stays usable.
        """
        vocab, engine = self._vocab, self.engine
        chat: _Chat | None = getattr(self._chat, "call", None)
        tokens = completion_tokens(prompt, suffix, vocab, self._tokenize, suffix_first=self.spm_infill)
        if chat is not None:
            tokens = one_bos(tokens, vocab)
        if len(tokens) >= engine.n_ctx:
            raise ContextOverflowError(len(tokens), engine.n_ctx, evicts=engine.policy is not None)
        if max_tokens is None or max_tokens <= 0:
            max_tokens = None if engine.n_ctx <= engine.context.n_ctx_train else engine.context.n_ctx_train
        prompt_text = prompt if isinstance(prompt, str) else self._text_of(tokens)
        request = Request(
            tokens=tokens,
            sampling=self._sampling(
                temperature=temperature, top_p=top_p, min_p=min_p, typical_p=typical_p, top_k=top_k,
                frequency_penalty=frequency_penalty, presence_penalty=presence_penalty,
                repeat_penalty=repeat_penalty, mirostat_mode=mirostat_mode, mirostat_tau=mirostat_tau,
                mirostat_eta=mirostat_eta, seed=seed, logits_processor=logits_processor, grammar=grammar,
                logit_bias=logit_bias or {},
            ),
            max_tokens=max_tokens,
            stops=[stop] if isinstance(stop, str) else list(stop or ()),
            criteria=stopping_criteria,
            pins=self._pins(tokens, pin, chat),
            n_prompt_chars=len(prompt_text),
            n_top=logprobs,
            scores_prompt=echo and logprobs is not None,
            cancel=cancel or CancelToken(),
            progress=progress,
            draft=self._draft(),
        )  # fmt: skip
        response = Response(
            model if model is not None else self.model_path,
            request,
            prompt_text if echo else "",
            suffix if suffix and not has_infill(vocab) else "",
        )
        if stream:
            return self._stream(request, response, chat)
        with self._call(request.cancel):
            pieces: list[Piece] = []
            outcome = _collect(self._complete(request), pieces)
            result = response.whole(pieces, outcome, self.engine.report().as_dict())
        if chat is not None:
            chat.kv = result["kv"]
        return result

    @functools.wraps(create_completion)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.create_completion(*args, **kwargs)

    @checked
    def create_chat_completion(
        self,
        messages: Messages,
        functions: Functions | None = None,
        function_call: FunctionCall | None = None,
        tools: Tools | None = None,
        tool_choice: ToolChoice | None = None,
        temperature: Number = 0.2,
        top_p: Number = 0.95,
        top_k: Int32 = 40,
        min_p: Number = 0.05,
        typical_p: Number = 1.0,
        stream: Switch = False,
        stop: Texts | None = None,
        seed: Integer | None = None,
        response_format: ResponseFormat | None = None,
        max_tokens: Integer | None = None,
        presence_penalty: Number = 0.0,
        frequency_penalty: Number = 0.0,
        repeat_penalty: RepeatPenalty = 1.0,
        tfs_z: Number = 1.0,
        mirostat_mode: Mirostat = 0,
        mirostat_tau: Number = 5.0,
        mirostat_eta: Number = 0.1,
        model: Text | None = None,
        logits_processor: Processors | None = None,
        grammar: Grammar | None = None,
        logit_bias: Bias | None = None,
        logprobs: Switch | None = None,
        top_logprobs: Count | None = None,
    ) -> Any:
        """Reply to a chat; return an OpenAI-shaped result with a `kv` entry, or an iterator of chunks.

        Parameters are llama_cpp.Llama.create_chat_completion's, except:

        messages : content may be a list of parts; where the chat format reads texts only, text parts are
            joined by newlines, and others are refused.
        grammar, logit_bias, max_tokens : as create_completion's.

        Raises: what create_completion raises; ChatTemplateError, the model's template refuses the messages.
        """
        options = {name: value for name, value in locals().items() if name not in ("self", "messages")}
        if self.chat_handler is None:
            check_format(self.chat_format, self._chat_handlers)
        check_choice(tools or (), functions or (), tool_choice, function_call)
        options["stop"] = stop if isinstance(stop, str) else list(stop or ())
        call = _Chat(messages)
        with call.current(self._chat):
            result = high.Llama.create_chat_completion(self, messages, **options)
        if isinstance(result, dict):
            return {**result, "kv": call.kv}
        return call.with_kv(result, self._chat)

    # -- inside ---------------------------------------------------------------------------------------

    def _complete(self, request: Request) -> Generator[Piece, None, Outcome]:
        """complete, with llama-cpp-python's prompt cache around it."""
        if self.cache is not None:
            self._look_up(request.tokens)
        outcome = yield from complete(self.engine, request)
        if self.cache is not None and outcome.finish_reason != "cancelled":
            self.cache[[*request.tokens, *outcome.tokens]] = self._save_state()
        return outcome

    def _look_up(self, tokens: Sequence[int]) -> None:
        try:
            state = self.cache[tokens]
        except KeyError:
            return
        prefix = high.Llama.longest_token_prefix
        if prefix(state.input_ids.tolist(), tokens) > prefix(self.engine.tokens, tokens):
            self._load_state(state)

    def _stream(self, request: Request, response: Response, chat: _Chat | None) -> Iterator[dict[str, Any]]:
        turn, _ = self._begin(request.cancel)
        try:
            echo = response.echo()
            if echo is not None:
                yield from _paused(turn, echo)
            pieces = self._complete(request)
            try:
                while True:
                    try:
                        piece = next(pieces)
                    except StopIteration as end:
                        outcome: Outcome = end.value
                        break
                    yield from _paused(turn, response.chunk(piece))
            finally:
                pieces.close()
            last = response.last_chunk(outcome, self.engine.report().as_dict())
        finally:
            self._end(turn)
        if chat is not None:
            chat.kv = last["kv"]
        yield last

    def _pins(self, tokens: Sequence[int], pin: Sequence[Span] | None, chat: _Chat | None) -> list[Span]:
        spans = list(pin or ())
        if isinstance(self._pin, tuple):
            spans += self._pin
        elif self._pin == "system" and chat is not None:
            for text in chat.system_texts():
                span = find_text(tokens, text, self._vocab)
                if span is None:
                    logger.warning("the chat template hides the system message, so it cannot be pinned")
                    continue
                start, end = span
                spans.append((0 if start <= SYSTEM_HEAD_MAX else start, end))
        return spans

    def _tokenize(self, text: bytes, add_bos: bool, special: bool) -> list[int]:
        return list(self.tokenize(text, add_bos=add_bos, special=special))

    def _text_of(self, tokens: Sequence[int]) -> str:
        return b"".join(self._vocab.piece(token) for token in tokens).decode("utf-8", "ignore")

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = False) -> list[int]:
        """The tokens of UTF-8 text; `special`: the names of control tokens count as these tokens."""
        if not isinstance(text, (bytes, bytearray)):
            raise OptionError(f"tokenize takes bytes, not {type(text).__name__}: use text.encode()", "text")
        return list(high.Llama.tokenize(self, bytes(text), add_bos, special))

    if TYPE_CHECKING:  # what the other halves of H2OLlama bring

        @property
        def engine(self) -> Engine: ...
        def _begin(self, cancel: CancelToken) -> tuple[Turn, CancelToken]: ...
        def _end(self, turn: Turn) -> None: ...
        def _draft(self) -> Draft | None: ...
        def _call(self, cancel: CancelToken | None = None) -> AbstractContextManager[CancelToken]: ...
        def _sampling(self, **knobs: Any) -> SamplingOptions: ...
        def _save_state(self) -> Any: ...
        def _load_state(self, state: Any) -> None: ...


class _Chat:
    """The chat call a completion belongs to."""

    def __init__(self, messages: Sequence[Mapping[str, Any]]) -> None:
        self.messages = messages
        self.kv: dict[str, Any] | None = None

    def system_texts(self) -> list[str]:
        """The texts of the system messages at the head of the chat."""
        texts = []
        for message in self.messages:
            if message.get("role") not in ("system", "developer"):
                break
            content = message.get("content") or ""
            parts = [content] if isinstance(content, str) else [part.get("text", "") for part in content]
            texts += [part for part in parts if part.strip()]
        return texts

    @contextmanager
    def current(self, place: threading.local) -> Iterator[None]:
        """Make this the call that completions of this thread belong to."""
        before = getattr(place, "call", None)
        place.call = self
        try:
            yield
        finally:
            place.call = before

    def with_kv(
        self, chunks: Iterator[dict[str, Any]], place: threading.local
    ) -> Generator[dict[str, Any], None, None]:
        """The chunks of a stream; the one that ends it says how the cache is."""
        while True:
            with self.current(place):  # some handlers ask for their completions only now
                chunk = next(chunks, None)
            if chunk is None:
                return
            choices = chunk.get("choices") or [{}]
            yield chunk if choices[0].get("finish_reason") is None else {**chunk, "kv": self.kv}


def _collect(pieces: Generator[Piece, None, Outcome], into: list[Piece]) -> Outcome:
    while True:
        try:
            into.append(next(pieces))
        except StopIteration as end:
            outcome: Outcome = end.value
            return outcome


def _paused(turn: Turn, chunk: dict[str, Any]) -> Iterator[dict[str, Any]]:
    turn.pause()
    yield chunk
    turn.resume()

"""The token-level half of `llama_cpp.Llama`: eval, sample, generate, and the arrays its users read."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from h2o_gguf.cancel import CancelToken
from h2o_gguf.checked import checked
from h2o_gguf.drafts import Draft
from h2o_gguf.engine import Engine
from h2o_gguf.errors import ClosedError, OptionError
from h2o_gguf.kinds import Callback, Int32, Number, Switch, Tokens
from h2o_gguf.lock import CallLock, Turn
from h2o_gguf.logit_rows import LogitRows
from h2o_gguf.options import Grammar, Mirostat, Processors, RepeatPenalty
from h2o_gguf.sampling import ChainSampler, SamplingOptions

__all__ = ["LowLevel"]

FOREIGN = -1  # a position another program filled, such as a part of an image


class LowLevel:
    """Methods and attributes with llama-cpp-python's names and meaning, on top of an Engine."""

    _engine: Engine | None
    _no_engine: str  # why there is none
    _lock: CallLock
    _n_vocab: int
    _logits_all: bool
    _rows: LogitRows
    _closed: bool
    _is_recurrent: bool
    _is_hybrid: bool
    draft_model: Any
    _running: CancelToken | None
    last_n_tokens_size: int

    @property
    def engine(self) -> Engine:
        """The engine.  Raises ClosedError; OptionError, the object cannot generate."""
        if self._closed:
            raise ClosedError("this H2OLlama")
        if self._engine is None:
            raise OptionError(f"this H2OLlama cannot generate: {self._no_engine}", "embedding")
        return self._engine

    # -- the arrays -----------------------------------------------------------------------------------

    @property
    def n_tokens(self) -> int:
        """Tokens of the sequence, evicted ones included.  Set it lower to forget the rest."""
        return self._engine.n_past if self._engine is not None else 0

    @n_tokens.setter
    def n_tokens(self, n: int) -> None:
        if self._engine is None:
            return
        engine = self.engine
        if n > engine.n_past:
            # Image handlers decode into the context themselves and then tell us where it stands.
            if engine.context.n_past() != n:
                raise OptionError(f"n_tokens is set to {n}, but the context holds {engine.context.n_past()}")
            self._rows.shorten(engine.n_past)
            engine.adopt([*engine.tokens, *[FOREIGN] * (n - engine.n_past)], None)
        elif not engine.rollback(n):
            kept = engine.tokens[:n]
            engine.context.vocab.check(kept)  # parts of an image cannot be read again
            engine.reset()
            if kept:
                engine.prefill(kept)

    @property
    def input_ids(self) -> NDArray[np.intc]:
        """The tokens of the sequence: a copy, int32[n_tokens]."""
        return self._engine.token_array.copy() if self._engine is not None else np.zeros(0, np.intc)

    @property
    def _input_ids(self) -> NDArray[np.intc]:
        return self.input_ids

    @property
    def scores(self) -> NDArray[np.single]:
        """Logits: float32[n_tokens, n_vocab] with logits_all=True, else the last token's, [1, n_vocab].

        Rows of tokens that were not evaluated here are NaN, but for the last: parts of images, and the tokens
        of a loaded session, unless it is a LlamaState of an object with logits_all=True.
        """
        if self._logits_all:
            return self._rows.first(self.n_tokens)
        logits = self._engine.logits if self._engine is not None else None
        return np.zeros((0, self._n_vocab), np.single) if logits is None else logits[None, :]

    @property
    def _scores(self) -> NDArray[np.single]:
        return self.scores

    # -- the methods ----------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget the sequence."""
        if self._engine is not None or self._closed:
            with self._call():
                self.engine.reset()

    @checked
    def eval(self, tokens: Tokens) -> None:
        """Append tokens to the sequence, any number of them.

        Raises: ContextOverflowError, they do not fit and nothing may be evicted.
        """
        with self._call() as cancel:
            self.engine.prefill(tokens, cancel=cancel)

    @checked
    def sample(
        self,
        top_k: Int32 = 40,
        top_p: Number = 0.95,
        min_p: Number = 0.05,
        typical_p: Number = 1.0,
        temp: Number = 0.80,
        repeat_penalty: RepeatPenalty = 1.0,
        frequency_penalty: Number = 0.0,
        presence_penalty: Number = 0.0,
        tfs_z: Number = 1.0,
        mirostat_mode: Mirostat = 0,
        mirostat_eta: Number = 0.1,
        mirostat_tau: Number = 5.0,
        penalize_nl: Switch = True,
        logits_processor: Processors | None = None,
        grammar: Grammar | None = None,
        idx: Int32 | None = None,
    ) -> int:
        """Return a next token, without appending it.

        idx : the position whose logits are used; other than the last needs logits_all=True.
        """
        options = self._sampling(
            temperature=temp, top_k=top_k, top_p=top_p, min_p=min_p, typical_p=typical_p,
            repeat_penalty=repeat_penalty, frequency_penalty=frequency_penalty,
            presence_penalty=presence_penalty,
            mirostat_mode=mirostat_mode, mirostat_eta=mirostat_eta, mirostat_tau=mirostat_tau,
            logits_processor=logits_processor, grammar=grammar, seed=None,
        )  # fmt: skip
        with self._call(), ChainSampler(self.engine.context.vocab, options) as sampler:
            engine = self.engine
            logits = engine.logits
            if idx is not None and idx != engine.n_past - 1:
                if not self._logits_all or not 0 <= idx < engine.n_past:
                    raise OptionError(
                        f"no logits are kept for position {idx}: use logits_all=True", "logits_all"
                    )
                logits = self.scores[idx]
                if np.isnan(logits).any():
                    raise OptionError(
                        f"the logits of position {idx} are not known: it came with a session or an image; "
                        "eval its tokens here",
                        "idx",
                    )
            if logits is None:
                raise OptionError("nothing has been read yet: eval a prompt first", "prompt")
            token = sampler.sample(logits, engine.token_array)
            if token is None:
                raise OptionError("grammar and processors leave no token", "grammar", "logits_processor")
            return token

    @checked
    def generate(
        self,
        tokens: Tokens,
        top_k: Int32 = 40,
        top_p: Number = 0.95,
        min_p: Number = 0.05,
        typical_p: Number = 1.0,
        temp: Number = 0.80,
        repeat_penalty: RepeatPenalty = 1.0,
        reset: Switch = True,
        frequency_penalty: Number = 0.0,
        presence_penalty: Number = 0.0,
        tfs_z: Number = 1.0,
        mirostat_mode: Mirostat = 0,
        mirostat_tau: Number = 5.0,
        mirostat_eta: Number = 0.1,
        penalize_nl: Switch = True,
        logits_processor: Processors | None = None,
        stopping_criteria: Callback | None = None,
        grammar: Grammar | None = None,
    ) -> Generator[int, Sequence[int] | None, None]:
        """Yield tokens after a prompt, for ever: end-of-text tokens are yielded like others.

        What is sent into the generator is appended after the token. Ends with the context, where nothing may
        be evicted. reset : whether `tokens` is the whole sequence (what is in the cache is reused), or
        follows what was read before.
        """
        options = self._sampling(
            temperature=temp, top_k=top_k, top_p=top_p, min_p=min_p, typical_p=typical_p,
            repeat_penalty=repeat_penalty, frequency_penalty=frequency_penalty,
            presence_penalty=presence_penalty,
            mirostat_mode=mirostat_mode, mirostat_eta=mirostat_eta, mirostat_tau=mirostat_tau,
            logits_processor=logits_processor, grammar=grammar, seed=None,
        )  # fmt: skip
        prompt = list(tokens)
        turn, cancel = self._begin(CancelToken())
        try:
            engine = self.engine
            with ChainSampler(engine.context.vocab, options) as sampler:
                if reset:
                    engine.sync(prompt, cancel=cancel)
                elif prompt:
                    engine.prefill(prompt, cancel=cancel)
                while True:
                    stream = engine.generate(sampler, cancel=cancel, draft=self._draft())
                    try:
                        sent = None
                        for token in stream:
                            if stopping_criteria is not None and stopping_criteria(
                                engine.token_array, self.scores[-1]
                            ):
                                return
                            turn.pause()
                            sent = yield token
                            turn.resume()
                            if sent is not None:
                                break
                    finally:
                        stream.close()
                    if sent is None:
                        return
                    engine.prefill([token, *(int(t) for t in sent)], cancel=cancel)
        finally:
            self._end(turn)

    def _draft(self) -> Draft | None:
        """Who guesses tokens; nobody where they could not be taken back."""
        if self.draft_model is None or self._is_recurrent or self._is_hybrid:
            return None
        draft: Draft = self.draft_model
        return draft

    # -- one call at a time ---------------------------------------------------------------------------

    def cancel(self) -> None:
        """Stop the running call, from any thread.

        A completion returns what it has, with finish_reason "cancelled"; eval raises Cancelled.
        """
        running = self._running
        if running is not None:
            running.cancel()

    def _begin(self, cancel: CancelToken) -> tuple[Turn, CancelToken]:
        turn = self._lock.enter()
        self._running = cancel
        return turn, cancel

    def _end(self, turn: Turn) -> None:
        self._running = None
        turn.end()

    @contextmanager
    def turn(self, cancel: CancelToken | None = None) -> Iterator[tuple[Turn, CancelToken]]:
        """The right to use `engine` in a with-block, and the token that cancel() and close() set.

        Between two steps Turn.pause lets close() in, Turn.resume goes on.  Raises: BusyError; ClosedError.
        """
        turn, token = self._begin(cancel or CancelToken())
        try:
            _ = self.engine
            yield turn, token
        finally:
            self._end(turn)

    @contextmanager
    def _call(self, cancel: CancelToken | None = None) -> Iterator[CancelToken]:
        turn, token = self._begin(cancel or CancelToken())
        try:
            yield token
        finally:
            self._end(turn)

    def _sampling(
        self, *, logits_processor: Any, grammar: Any, seed: int | None, **knobs: Any
    ) -> SamplingOptions:
        """Options for one generation; seed None: the next of this object's."""
        processors = () if logits_processor is None else logits_processor
        if callable(processors) and not isinstance(processors, (list, tuple)):
            processors = (processors,)
        return SamplingOptions(
            **knobs,
            penalty_last_n=self.last_n_tokens_size,
            seed=self._next_seed() if seed is None or seed < 0 else seed,
            logits_processors=tuple(processors),
            grammar=grammar if grammar is None else _texts_of(grammar),
        )

    if TYPE_CHECKING:

        def _next_seed(self) -> int: ...


def _texts_of(grammar: Any) -> tuple[str, str]:
    """The GBNF text of a grammar and the name of its root rule."""
    return (grammar, "root") if isinstance(grammar, str) else (grammar._grammar, grammar._root)

"""Saving and loading the sequence of an H2OLlama."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np

from h2o_gguf.cancel import CancelToken
from h2o_gguf.errors import StateFileError
from h2o_gguf.logit_rows import LogitRows
from h2o_gguf.native import high
from h2o_gguf.restoring import restore_session, save_session
from h2o_gguf.state import Session

if TYPE_CHECKING:
    from h2o_gguf.engine import Engine

__all__ = ["Sessions"]

POSITION_OPTIONS = (  # keys are kept rotated, so these must be equal
    "rope_scaling_type", "rope_freq_base", "rope_freq_scale", "yarn_ext_factor", "yarn_attn_factor",
    "yarn_beta_fast", "yarn_beta_slow", "yarn_orig_ctx",
)  # fmt: skip


class Sessions:
    """save_state and load_state, which also keep positions, scores and pins."""

    context_params: Any
    scores: Any
    _fingerprint: str  # of the model file as it was loaded: it may be gone or another one by now
    _logits_all: bool
    _model: Any
    _n_vocab: int
    _rows: LogitRows
    _seed: int

    def save_state(self) -> Any:
        """The sequence as a llama_cpp.LlamaState; its size grows with the cells used and the attic.

        Its scores are the last token's logits; with logits_all=True those of every token, which take more.
        """
        with self._call():
            return self._save_state()

    def load_state(self, state: Any) -> None:
        """Go on where a state was saved, here or in another process.

        state : a LlamaState of save_state, or its llama_state bytes. Those have no logits but the last
            token's: with logits_all=True the rows of the others are NaN in `scores`.

        Raises: StateFileError, it is damaged, or belongs to another model or kind of cache; BudgetError, what
            it pins does not fit. The object then goes on where it was.
        """
        with self._call():
            self._load_state(state)

    def _save_state(self) -> Any:
        session = save_session(self.engine, self._facts())
        data = session.to_bytes()
        return high.LlamaState(
            input_ids=session.tokens.astype(np.intc),
            scores=self.scores.copy(),
            n_tokens=int(session.tokens.size),
            llama_state=data,
            llama_state_size=len(data),
            seed=self._seed,
        )

    def _load_state(self, state: Any) -> None:
        data = getattr(state, "llama_state", state)
        if not isinstance(data, (bytes, bytearray, memoryview)):
            raise StateFileError(
                f"a {type(data).__name__} is no saved session: load what save_state returned"
            )
        session = Session.from_bytes(data)
        restore_session(self.engine, session, self._facts())
        if self._logits_all:
            self._rows = self._rows_of(session, getattr(state, "scores", None))

    def _rows_of(self, session: Session, scores: Any) -> LogitRows:
        rows, n = LogitRows(self._n_vocab), int(session.tokens.size)
        if np.shape(scores) == (n, self._n_vocab):
            rows.put(0, scores)
        if session.logits.size:
            rows.put(n - 1, session.logits[None, :])
        return rows

    def _facts(self) -> dict[str, Any]:
        """What must be equal where a session is loaded."""
        cache = self.engine.cache
        groups = [list(group.layer_ids) for group in cache.groups] if cache is not None else []
        return {
            **({"layer_groups": groups} if len(groups) > 1 else {}),
            "model": self._model.desc(),
            "n_params": int(self._model.n_params()),
            "fingerprint": self._fingerprint,
            "n_vocab": self._n_vocab,
            "type_k": int(self.context_params.type_k),
            "type_v": int(self.context_params.type_v),
            "flash_attn": int(self.context_params.flash_attn_type),
            **{name: getattr(self.context_params, name) for name in POSITION_OPTIONS},
        }

    if TYPE_CHECKING:  # what the other parts of H2OLlama bring

        @property
        def engine(self) -> Engine: ...
        def _call(self, cancel: CancelToken | None = None) -> AbstractContextManager[CancelToken]: ...

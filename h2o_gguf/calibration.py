"""What each layer of a model loses at each budget, found by reading a text once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from h2o_gguf import policies
from h2o_gguf.errors import OptionError
from h2o_gguf.fingerprint import fingerprint
from h2o_gguf.models import read_shape, require_support
from h2o_gguf.policies import Cells, LeastLoss, NoEviction, Policy, Staged
from h2o_gguf.protocols import Progress
from h2o_gguf.view import CacheView

if TYPE_CHECKING:
    from h2o_gguf.llama import H2OLlama

__all__ = ["N_TOKENS", "Calibration", "calibrate", "layer_losses"]

N_TOKENS = 2048
N_QUERIES = 256  # the last tokens of the text, whose attention is measured
N_BATCH = 128
N_BUDGETS = 24
LEAST = 16  # the smallest budget
RULE = (
    "for each layer and budget: evict once, as the policy says, n_queries before the end; the squared change "
    "of the attention output of the queries after that, over their squared output"
)


@dataclass(frozen=True)
class Calibration:
    """Losses by layer and budget of a model, and how they were found.

    fingerprint : of the model file. text_sha256 : of what was read. n_tokens : of it, the last n_queries of
    which were measured. layers, budgets, losses : see LeastLoss.
    """

    model: str
    fingerprint: str
    text_sha256: str
    n_tokens: int
    n_queries: int
    policy: str
    rule: str
    layers: tuple[int, ...]
    budgets: tuple[int, ...]
    losses: tuple[tuple[float, ...], ...]

    def split(self, mean: int) -> LeastLoss:
        """The budgets that lose least with this mean.  Raises: OptionError, BudgetError."""
        return LeastLoss(mean, self.layers, self.budgets, self.losses)

    def save(self, path: str | Path) -> None:
        """Write it as JSON.  Raises: OptionError, the file cannot be written."""
        try:
            Path(path).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise OptionError(f"cannot write {str(path)!r}: {error.strerror or error}", "out") from error

    @classmethod
    def load(cls, path: str | Path, model_path: str | None = None) -> Calibration:
        """Read what `save` wrote.  model_path : of the model it must be of; None: any.

        Raises: OptionError, the file cannot be read, is no calibration, or is another model's.
        """
        try:
            found = TypeAdapter(cls).validate_json(Path(path).read_bytes())
            found.split(1)
        except OSError as error:
            raise OptionError(
                f"cannot read {str(path)!r}: {error.strerror or error}; layer_budgets can be pyramid, "
                "pyramid:BETA, a file that h2o-gguf calibrate wrote, or a number of entries for each layer",
                "layer_budgets",
            ) from error
        except (ValidationError, OptionError) as error:
            raise OptionError(
                f"{str(path)!r} is no calibration: give a file that h2o-gguf calibrate wrote", "layer_budgets"
            ) from error
        if model_path is not None and found.fingerprint != fingerprint(model_path):
            raise OptionError(
                f"{str(path)!r} was calibrated on {found.model}, which is not the model in {model_path!r}: "
                "calibrate that one",
                "layer_budgets",
            )
        return found


@dataclass(frozen=True)
class _Watching:
    """Evicts nothing, and has queries recorded."""

    budget: int
    n_observed: int
    granularity: str

    name: ClassVar[str] = "watching"
    n_sink: ClassVar[int] = 0
    n_recent: ClassVar[int] = 0
    needs_scores: ClassVar[bool] = False
    decay: ClassVar[float] = 1.0
    n_trace: ClassVar[int] = 0

    def victims(self, view: CacheView, n: int) -> Cells:
        raise NotImplementedError


def calibrate(
    model_path: str,
    text: str,
    policy: str = "h2o+",
    *,
    n_tokens: int | None = None,
    n_threads: int = 0,
    n_gpu_layers: int = 0,
    progress: Progress | None = None,
) -> Calibration:
    """Read the beginning of a text with the full cache and measure what every layer would lose.

    text : at least n_tokens long. policy : by whom entries would be evicted.
    n_tokens : read, more than 2 * 256, and as many as the model's positions hold; None: at most N_TOKENS.
    progress : called with (tokens read, tokens in all).

    Raises: OptionError, the text is too short or the model knows fewer positions; what H2OLlama raises.
    Source: ours.
    """
    most = require_support(read_shape(model_path)).n_pos_max - N_BATCH
    n_tokens = min(N_TOKENS, most) if n_tokens is None else n_tokens
    if not 2 * N_QUERIES < n_tokens <= most:
        raise OptionError(
            f"{n_tokens} tokens cannot be calibrated on: it must be {2 * N_QUERIES + 1} to {most:,}, "
            "which this model's full cache can hold",
            "length",
        )
    from h2o_gguf.llama import H2OLlama

    def staged(budget: int) -> Staged:
        inner = policies.make(policy, budget)
        if isinstance(inner, NoEviction):
            raise OptionError("policy none evicts nothing: calibrate for another, such as h2o+", "policy")
        return Staged(inner, _Watching(budget, N_QUERIES, str(getattr(inner, "granularity", "head"))))

    with H2OLlama(
        model_path, policy=staged(n_tokens), n_batch=N_BATCH, n_threads=n_threads, n_gpu_layers=n_gpu_layers
    ) as llm:
        tokens = llm.tokenize(text.encode())[:n_tokens]
        if len(tokens) < n_tokens:
            raise OptionError(
                f"the text has {len(tokens)} tokens, and {n_tokens} shall be read: take a longer text, or "
                "fewer tokens",
                "length",
            )
        n_before = n_tokens - N_QUERIES
        before = _read(llm, tokens, 0, n_before, progress)
        budgets = _budgets(n_before)
        victims = [_positions(before, staged(budget), n_before - budget) for budget in budgets]
        after = _read(llm, tokens, n_before, n_tokens, progress)
        losses = [[float(loss) for loss in layer_losses(after, row, [v[row] for v in victims])]
                  for row in range(after.shape[0])]  # fmt: skip
        return Calibration(
            model=Path(model_path).stem,
            fingerprint=fingerprint(model_path),
            text_sha256=hashlib.sha256(llm.detokenize(tokens)).hexdigest(),
            n_tokens=n_tokens,
            n_queries=N_QUERIES,
            policy=staged(n_tokens).prompt.name,
            rule=RULE,
            layers=after.layer_ids,
            budgets=budgets,
            losses=tuple(tuple(row) for row in losses),
        )


def layer_losses(view: CacheView, row: int, gone: Sequence[NDArray[np.bool_]]) -> Iterator[float]:
    """Yield what a layer's attention output loses without some entries: 0 .. about 1, for each set of them.

    The squared change of the recorded queries' outputs over their squared length, both summed over queries
    and heads. view : nothing was evicted. row : the layer's.
    gone : bool[n_head_kv, n_pos] each, the positions that are not there; not all a query sees.
    """
    attention = view.attention(row)
    values = np.where(view.pos[row, :, :, None] >= 0, view.seen.values(row), 0)[:, None]
    whole = attention @ values
    n_head_kv, n_cells = view.pos.shape[1:]
    for positions in gone:
        is_gone = np.zeros((n_head_kv, n_cells), np.bool_)
        is_known = (view.pos[row] >= 0) & (view.pos[row] < positions.shape[-1])
        head, cell = np.nonzero(is_known)
        is_gone[head, cell] = positions[head, view.pos[row][is_known]]
        left = np.where(is_gone[:, None, None], 0, attention)
        left /= np.maximum(left.sum(-1, keepdims=True), np.finfo(np.float32).tiny)
        yield float(np.square(left @ values - whole).sum() / np.square(whole).sum())


def _read(llm: H2OLlama, tokens: Sequence[int], start: int, end: int, progress: Progress | None) -> CacheView:
    """Read tokens start .. end; return the cache after that."""

    def report(n: int, _: int) -> None:
        if progress is not None:
            progress(start + n, len(tokens))

    llm.engine.prefill(tokens[start:end], progress=report)
    view = llm.engine.view()
    assert view is not None
    return replace(view, n_prompt=view.n_past)


def _budgets(n: int) -> tuple[int, ...]:
    """About N_BUDGETS of them, from LEAST to n, by equal factors."""
    return tuple(int(b) for b in np.unique(np.round(np.geomspace(LEAST, n, N_BUDGETS)).astype(int)))


def _positions(view: CacheView, policy: Policy, n: int) -> NDArray[np.bool_]:
    """Which positions the policy would evict: bool[n_layer, n_head_kv, n_past]."""
    victims: Any = policy.victims(view, n)
    gone = np.zeros((*view.shape[:2], view.n_past), np.bool_)
    np.put_along_axis(gone, np.take_along_axis(view.pos, victims, -1).astype(np.int64), True, -1)
    return gone

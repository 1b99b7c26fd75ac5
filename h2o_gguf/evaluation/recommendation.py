"""The smallest budget that loses no more than the user tolerates, and how sure that is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from h2o_gguf.evaluation.cells import Kept
from h2o_gguf.evaluation.runner import Result
from h2o_gguf.evaluation.side_by_side import Reading
from h2o_gguf.evaluation.statistics import Interval, bootstrap, hidden_loss, samples_needed
from h2o_gguf.evaluation.summary import floors, paired
from h2o_gguf.evaluation.variants import AUTO, PLAIN, Variant

__all__ = ["Candidate", "Recommendation", "candidates", "recommend"]


SAME_SIZE = 1.02  # caches of one budget differ by the rows of a last batch


@dataclass(frozen=True)
class Candidate:
    """One cache at one budget, over all lengths and all tasks that are no floor.

    budget, kept_bytes : at the longest length. score_loss : of the score, 0 to 1, to the full cache's.
    perplexity_loss : the growth of perplexity over the full cache's. None where it was not measured.
    """

    variant: Variant
    kept: Kept
    budget: int
    kept_bytes: int
    score_loss: Interval | None
    perplexity_loss: Interval | None

    @property
    def losses(self) -> list[Interval]:
        """What was measured."""
        return [loss for loss in (self.score_loss, self.perplexity_loss) if loss is not None]

    @property
    def worst(self) -> float:
        """The larger loss; infinite if nothing was measured."""
        return max((loss.mean for loss in self.losses), default=float("inf"))

    def is_proven(self, tolerance: float) -> bool:
        """Whether every interval lies below the tolerance, what so many samples cannot see included."""
        if self.score_loss is not None and hidden_loss(self.score_loss.n) > tolerance:
            return False
        return bool(self.losses) and all(loss.high <= tolerance for loss in self.losses)


@dataclass(frozen=True)
class Recommendation:
    """What to take.  choice : None: the full cache. is_proven : intervals included. reasons : sentences."""

    choice: Candidate | None
    is_proven: bool
    tolerance: float
    reasons: tuple[str, ...]
    candidates: tuple[Candidate, ...]

    @property
    def headline(self) -> str:
        """The recommendation in one sentence."""
        if self.choice is None:
            return "Keep the full cache, or measure larger budgets."
        sure = "" if self.is_proven else " (not proven)"
        return f"Keep {show_kept(self.choice)} with {self.choice.variant.name}{sure}."

    def as_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return asdict(self) | {"headline": self.headline}


def candidates(results: Sequence[Result], fidelity: Sequence[Reading]) -> list[Candidate]:
    """Everything but the full cache that was measured, smallest budget first."""
    low = floors(results)
    losses: dict[tuple[Variant, Kept], dict[tuple[int, str], list[float]]] = {}
    sizes: dict[tuple[Variant, Kept], tuple[int, int]] = {}
    for result, loss in paired(results):
        cell = result.cell
        key = cell.variant, cell.kept
        if cell.variant.is_reference:
            continue
        sizes[key] = max(sizes.get(key, (0, 0)), (cell.budget, result.outcome.kept_bytes))
        strata = losses.setdefault(key, {})
        if loss is not None and (cell.length, cell.task) not in low:
            strata.setdefault((cell.length, cell.task), []).append(loss)
    texts: dict[tuple[Variant, Kept], Interval] = {}
    for each in fidelity:
        key = each.variant, each.kept
        if not each.variant.is_reference:
            ratio = each.ratio
            texts[key] = Interval(ratio.mean - 1, ratio.low - 1, ratio.high - 1, ratio.n)
            sizes.setdefault(key, (each.budget, each.kept_bytes))
    found = [
        Candidate(
            *key,
            *sizes[key],
            score_loss=bootstrap(list(losses[key].values())) if losses.get(key) else None,
            perplexity_loss=texts.get(key),
        )
        for key in sizes
    ]
    return sorted(found, key=lambda c: (c.kept_bytes, c.budget, c.worst))


def recommend(results: Sequence[Result], fidelity: Sequence[Reading], tolerance: float) -> Recommendation:
    """The smallest budget whose losses are at most the tolerance, 0 to 1; of several policies the best.

    A control that draws at random is never chosen.
    """
    found = candidates(results, fidelity)
    real = [c for c in found if not c.variant.is_control]
    fitting = [c for c in real if c.worst <= tolerance]
    reasons: list[str] = []
    low, tasks = floors(results), {(r.cell.length, r.cell.task) for r in results}
    if low:
        names = ", ".join(f"{task} at {length:,} tokens ({s:.0%})" for (length, task), s in low.items())
        left = "they do not count" if len(low) < len(tasks) else "so only perplexity counts"
        reasons.append(f"The full cache itself scores below 80 % in {names}: {left}.")
    if not fitting:
        if measured := [c for c in real if c.losses]:
            best = min(measured, key=lambda c: c.worst)
            reasons.append(
                f"No policy stays within {tolerance:.1%} at the budgets measured. The least loss is that of "
                f"{best.variant.name} with {show_kept(best)}: {show_losses(best)}."
            )
        elif real:
            reasons.append("So nothing here tells one cache from another: take other tasks, or fidelity.")
        return Recommendation(None, False, tolerance, tuple(reasons), tuple(found))
    smallest = min(c.kept_bytes for c in fitting)
    choice = min((c for c in fitting if c.kept_bytes <= smallest * SAME_SIZE), key=lambda c: c.worst)
    reasons.append(
        f"It is the smallest budget measured that loses no more than {tolerance:.1%}: {show_losses(choice)}."
    )
    if all(result.cell.mode == "bounded" for result in results):
        reasons.append(f"To use it: {_flags(choice)}.")
    if choice.variant.attic:
        reasons.append("What is evicted stays in the host's memory, which is not counted here.")
    is_proven = choice.is_proven(tolerance)
    if not is_proven:
        reasons.append(_doubt(choice, tolerance))
    reasons += _beside(choice, found)
    return Recommendation(choice, is_proven, tolerance, tuple(reasons), tuple(found))


def show_kept(candidate: Candidate) -> str:
    """The budget in words."""
    entries = f"{candidate.budget:,} entries per KV head, {candidate.kept_bytes / 2**20:.1f} MiB"
    if candidate.variant.is_full:
        return f"everything ({entries})"
    return f"{100 * candidate.kept:g}% ({entries})" if candidate.kept < 1 else entries


def show_losses(candidate: Candidate) -> str:
    """The losses in words."""
    words = []
    if (loss := candidate.score_loss) is not None:
        words.append(f"{_points(loss)} points of the score over {_samples(loss.n)}")
    if (loss := candidate.perplexity_loss) is not None:
        words.append(
            f"perplexity {loss.mean:+.1%} ({loss.low:+.1%} to {loss.high:+.1%}) over {loss.n:,} tokens"
        )
    return ", ".join(words) or "nothing was measured"


def _points(loss: Interval) -> str:
    return f"{100 * loss.mean:.1f} ({100 * loss.low:.1f} to {100 * loss.high:.1f})"


def _samples(n: int) -> str:
    return f"{n:,} sample" if n == 1 else f"{n:,} samples"


def _flags(choice: Candidate) -> str:
    """What says it to every other command."""
    variant = choice.variant
    words = f"--policy {variant.policy}"
    if not variant.is_full:
        words += f" --kv-budget {choice.budget}"
    if (variant.type_k, variant.type_v) != (PLAIN, PLAIN):
        words += f" --cache-type-k {variant.type_k} --cache-type-v {variant.type_v}"
    if variant.attic:
        words += " --attic ram"
    if variant.attic and variant.recall_every != AUTO:
        words += f" --recall-every {variant.recall_every}"
    return words


def _doubt(choice: Candidate, tolerance: float) -> str:
    """Why it is not proven, and what would."""
    words = []
    if (loss := choice.score_loss) is not None and hidden_loss(loss.n) > tolerance:
        words.append(
            f"n is too small: {_samples(loss.n)} without a loss would still hide one of "
            f"{hidden_loss(loss.n):.0%}, and to rule out more than {tolerance:.1%} takes "
            f"{samples_needed(tolerance):,} of them"
        )
    wide = [name for name, loss in (("score", choice.score_loss), ("perplexity", choice.perplexity_loss))
            if loss is not None and loss.high > tolerance]  # fmt: skip
    if wide:
        words.append(f"the interval of the {' and of the '.join(wide)} reaches beyond {tolerance:.1%}")
    return f"That is not proven: {'; '.join(words)}."


def _beside(choice: Candidate, found: Sequence[Candidate]) -> list[str]:
    """How the controls did at the same budget."""
    said = []
    for other in found:
        is_other = other.variant.is_control or other.variant.policy == "streaming"
        if other.kept != choice.kept or other.variant == choice.variant or not is_other:
            continue
        said.append(f"Beside it, {other.variant.name} lost: {show_losses(other)}.")
        if other.worst <= choice.worst:
            said.append(
                f"That is no more than {choice.variant.name} lost: "
                "these texts do not show what the policy is worth."
            )
    return said

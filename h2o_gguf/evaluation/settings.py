"""What a user asks an evaluation for, and what is taken where nothing is said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

from h2o_gguf.errors import OptionError
from h2o_gguf.evaluation.cells import Kept, Mode, Question, budget_of
from h2o_gguf.evaluation.store import default_folder
from h2o_gguf.evaluation.tasks import FIDELITY, choose
from h2o_gguf.evaluation.variants import AUTO

__all__ = ["COMPARISON", "FULL_RUN", "QUICK_RUN", "Defaults", "Settings"]


@dataclass(frozen=True)
class Defaults:
    """What is measured unless it is named."""

    policies: tuple[str, ...]
    kept: str
    tasks: tuple[str, ...]
    lengths: tuple[int, ...]
    n_samples: int


QUICK_RUN = Defaults(("h2o+",), "0.5,0.25", (FIDELITY, "single-prose", "multikey", "multiquery"), (1024,), 3)
FULL_RUN = Defaults(("h2o+",), "0.5,0.25,0.1", ("all",), (1024, 2048, 4096), 20)
COMPARISON = Defaults(
    ("h2o", "h2o+"), "0.25", (FIDELITY, "single-noise", "single-prose", "multiquery"), (1024,), 2
)


@dataclass(frozen=True)
class Settings:
    """What is evaluated.  See cells.Cell.

    text : a file to read and to hide needles in. folder : of results; None: nothing is kept.
    tolerance : of losses, 0 to 1. layer_budgets : splits over the layers that are measured too. attic : so is
    everything that evicts, with an attic. recall_every : as Variant has it.
    """

    policies: tuple[str, ...]
    kept: tuple[Kept, ...]
    tasks: tuple[str, ...]
    lengths: tuple[int, ...]
    n_samples: int
    mode: Mode
    question: Question
    seed: int
    n_batch: int
    n_threads: int
    n_gpu_layers: int
    text: Path | None
    folder: Path | None
    tolerance: float
    layer_budgets: tuple[str, ...] = ()
    attic: bool = False
    recall_every: int = AUTO

    @classmethod
    def of(
        cls,
        defaults: Defaults,
        *,
        policies: Sequence[str] | None = None,
        kept: str | None = None,
        tasks: Sequence[str] | None = None,
        lengths: Sequence[int] | None = None,
        n_samples: int | None = None,
        mode: str = "bounded",
        question: str = "hidden",
        cache: str | None = None,
        tolerance: float = 1.0,
        layer_budgets: Sequence[str] | None = None,
        attic: bool = False,
        recall_every: int | None = None,
        **others: Any,
    ) -> Settings:
        """From words.  kept : numbers with commas between. cache : a folder, "off", or None for the user's.

        tolerance : in percent.  Raises: OptionError.
        """
        _check("mode", mode, get_args(Mode))
        _check("question", question, get_args(Question))
        recall_every = AUTO if recall_every is None else recall_every
        _check_recalls(attic, recall_every)
        if not 0 < tolerance < 100:
            raise OptionError(
                f"tolerance is {tolerance:g}: it must be percents above 0 and below 100", "tolerance"
            )
        found = cls(
            policies=tuple(dict.fromkeys(policies or defaults.policies)),
            kept=tuple(dict.fromkeys(_kept(word) for word in (kept or defaults.kept).split(","))),
            tasks=choose(tasks or defaults.tasks),
            lengths=tuple(sorted(set(lengths or defaults.lengths))),
            n_samples=n_samples or defaults.n_samples,
            mode=cast(Mode, mode),
            question=cast(Question, question),
            folder=None if cache == "off" else Path(cache) if cache else default_folder(),
            tolerance=tolerance / 100,
            layer_budgets=tuple(dict.fromkeys(layer_budgets or ())),
            attic=attic,
            recall_every=recall_every,
            **others,
        )
        found.budgets()
        return found

    def budgets(self) -> list[int]:
        """Entries per KV head, of every length.  Raises: OptionError."""
        return [budget_of(share, length) for share in self.kept for length in self.lengths]


def _check(name: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise OptionError(f"{name} is {value!r}: it must be {' or '.join(allowed)}", name)


def _check_recalls(attic: bool, recall_every: int) -> None:
    if recall_every != AUTO and (recall_every < 0 or not attic):
        raise OptionError(
            f"recall_every is {recall_every}: it must be 0 or more tokens, and is of no use without an "
            "attic: there is nothing to recall from",
            "recall_every",
        )


def _kept(word: str) -> Kept:
    try:
        return float(word) if 0 < float(word) < 1 else int(word)
    except ValueError:
        raise OptionError(
            f"kept is {word!r}: it must be shares such as 0.25, or numbers of entries, with commas between",
            "kept",
        ) from None

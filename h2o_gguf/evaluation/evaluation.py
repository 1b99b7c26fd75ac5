"""A whole evaluation: from settings to a report."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

from h2o_gguf.benchmark.machine import environment
from h2o_gguf.errors import OptionError
from h2o_gguf.evaluation.cells import Kept, Mode, Question, budget_of, plan
from h2o_gguf.evaluation.evaluator import Evaluator
from h2o_gguf.evaluation.opening import ModelFile, check_lengths
from h2o_gguf.evaluation.recommendation import Recommendation, recommend
from h2o_gguf.evaluation.runner import Progress, Result, run
from h2o_gguf.evaluation.side_by_side import Fidelity, Reader
from h2o_gguf.evaluation.store import Store, default_folder
from h2o_gguf.evaluation.summary import Row, floors, summarize
from h2o_gguf.evaluation.tasks import FIDELITY, choose
from h2o_gguf.evaluation.variants import FULL, Variant, with_controls

__all__ = ["Report", "Settings", "evaluate"]

POLICIES = ("h2o+",)
TASKS = (FIDELITY, "single-prose", "multikey", "multiquery")
LENGTHS = (1024,)


@dataclass(frozen=True)
class Settings:
    """What is evaluated.  See cells.Cell.

    text : a file to read and to hide needles in. folder : of results; None: nothing is kept.
    tolerance : of losses, 0 to 1.
    """

    policies: tuple[str, ...]
    kept: tuple[Kept, ...]
    tasks: tuple[str, ...]
    lengths: tuple[int, ...]
    mode: Mode
    question: Question
    n_samples: int
    seed: int
    n_batch: int
    n_threads: int
    n_gpu_layers: int
    text: Path | None
    folder: Path | None
    tolerance: float

    @classmethod
    def of(
        cls,
        *,
        policies: Sequence[str] | None,
        kept: str,
        tasks: Sequence[str] | None,
        lengths: Sequence[int] | None,
        mode: str,
        question: str,
        cache: str | None,
        tolerance: float,
        **others: Any,
    ) -> Settings:
        """From words, with defaults.  Raises: OptionError."""
        if mode not in get_args(Mode):
            raise OptionError(f"mode is {mode!r}: it must be {' or '.join(get_args(Mode))}", "mode")
        if question not in get_args(Question):
            words = " or ".join(get_args(Question))
            raise OptionError(f"question is {question!r}: it must be {words}", "question")
        if not 0 < tolerance < 100:
            raise OptionError(
                f"tolerance is {tolerance:g}: it must be percents above 0 and below 100", "tolerance"
            )
        found = cls(
            tolerance=tolerance / 100,
            policies=tuple(dict.fromkeys(policies or POLICIES)),
            kept=tuple(dict.fromkeys(_kept(word) for word in kept.split(","))),
            tasks=choose(tasks or TASKS),
            lengths=tuple(sorted(set(lengths or LENGTHS))),
            mode=mode,  # type: ignore[arg-type]
            question=question,  # type: ignore[arg-type]
            folder=None if cache == "off" else Path(cache) if cache else default_folder(),
            **others,
        )
        for share in found.kept:
            for length in found.lengths:
                budget_of(share, length)
        return found


@dataclass(frozen=True)
class Report:
    """What came out.

    environment : machine, versions, model. settings : what was asked for. rows : by cache, budget, length and
    task. floors : (length, task, score) of tasks the full cache itself fails.
    fidelity : on a text, the full cache first. results : of every sample.
    """

    environment: dict[str, Any]
    settings: dict[str, Any]
    rows: tuple[Row, ...]
    floors: tuple[tuple[int, str, float], ...]
    fidelity: tuple[Fidelity, ...]
    recommendation: Recommendation
    results: tuple[Result, ...]

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON has it."""
        return {
            "environment": self.environment,
            "settings": self.settings,
            "rows": [row.as_dict() for row in self.rows],
            "floors": [list(floor) for floor in self.floors],
            "fidelity": [each.as_dict() for each in self.fidelity],
            "recommendation": self.recommendation.as_dict(),
            "results": [result.as_dict() for result in self.results],
        }


def evaluate(model: str, settings: Settings, progress: Progress | None = None) -> Report:
    """Measure what is new and report on everything.

    model : path of a GGUF file. progress : called with tokens done and in all.

    Raises: ModelFileError, UnsupportedModelError, OptionError, BudgetError before anything is run.
    """
    check_lengths(model, settings.lengths, settings.n_batch)
    budgets = [budget_of(share, length) for share in settings.kept for length in settings.lengths]
    variants = with_controls(settings.policies, budgets)
    tasks = [task for task in settings.tasks if task != FIDELITY]
    cells = plan(
        variants, settings.kept, tasks, settings.lengths, n_samples=settings.n_samples,
        seed=settings.seed, mode=settings.mode, question=settings.question, n_batch=settings.n_batch,
    )  # fmt: skip
    about = environment(model)
    text = settings.text.read_text(encoding="utf-8") if settings.text is not None else None
    evaluator = Evaluator(ModelFile(model, settings.n_threads, settings.n_gpu_layers), text)
    fidelity: list[Fidelity] = []
    with closing(Store(settings.folder, evaluator.facts())) as store:
        if FIDELITY in settings.tasks:
            n = max(settings.lengths)
            readers = [Reader(v, share, budget_of(share, n)) for share in settings.kept for v in variants]
            full = Reader(Variant(FULL), 1.0, n)
            fidelity = evaluator.fidelity([full, *readers], n, settings.n_batch, store, progress)
        order = {cell: i for i, cell in enumerate(cells)}
        results = sorted(run(cells, evaluator.answer, store, progress), key=lambda r: order[r.cell])
    return Report(
        environment=about,
        settings={name: str(v) if isinstance(v, Path) else v for name, v in asdict(settings).items()},
        rows=tuple(summarize(results)),
        floors=tuple((*key, score) for key, score in floors(results).items()),
        fidelity=tuple(fidelity),
        recommendation=recommend(results, fidelity, settings.tolerance),
        results=tuple(results),
    )


def _kept(word: str) -> Kept:
    try:
        return float(word) if 0 < float(word) < 1 else int(word)
    except ValueError:
        raise OptionError(
            f"kept is {word!r}: it must be shares such as 0.25, or numbers of entries, with commas between",
            "kept",
        ) from None

"""A whole evaluation: from settings to a report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from h2o_gguf.benchmark.machine import environment
from h2o_gguf.documents import Document
from h2o_gguf.errors import OptionError
from h2o_gguf.evaluation.cells import budget_of, plan
from h2o_gguf.evaluation.evaluator import Evaluator
from h2o_gguf.evaluation.opening import ModelFile, check_lengths
from h2o_gguf.evaluation.recommendation import Recommendation, recommend
from h2o_gguf.evaluation.runner import Result, n_tokens_left, run
from h2o_gguf.evaluation.settings import Settings
from h2o_gguf.evaluation.side_by_side import Reader, Reading
from h2o_gguf.evaluation.store import Store
from h2o_gguf.evaluation.summary import Row, floors, summarize
from h2o_gguf.evaluation.tasks import FIDELITY
from h2o_gguf.evaluation.variants import FULL, Variant, compared, with_attics, with_controls
from h2o_gguf.layer_budgets import read_layer_budgets
from h2o_gguf.policies import LayerBudgets
from h2o_gguf.protocols import Progress
from h2o_gguf.text import readable

__all__ = ["Report", "compare_caches", "evaluate"]


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
    fidelity: tuple[Reading, ...]
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
    """Measure the policies and their controls at every budget, as far as that is new; report on everything.

    model : path of a GGUF file. progress : called with tokens done and in all.

    Raises: ModelFileError, UnsupportedModelError, OptionError, BudgetError before anything is run.
    """
    return _measure(model, settings, _variants(model, settings, with_controls), progress)


def compare_caches(
    model: str, settings: Settings, types: Sequence[str], progress: Progress | None = None
) -> Report:
    """Measure ways to save memory beside each other: windows, cache types, policies, and these together.

    types : of keys and values, beside f16. Others are evaluate's, and so is what is raised.
    """
    variants = _variants(model, settings, partial(compared, types=types))
    return _measure(model, settings, variants, progress, is_fresh=True)


def _variants(model: str, settings: Settings, choose: Callable[..., list[Variant]]) -> list[Variant]:
    """What is chosen of the policies.

    Raises: OptionError, a split is none, or not of this model.
    """
    for said in settings.layer_budgets:
        if isinstance(read_layer_budgets(said, model), tuple):
            raise OptionError(
                f"layer_budgets is {said!r}: budgets are shares of a length here (kept), so it must be "
                "pyramid, pyramid:BETA or the file of a calibration",
                "layer_budgets",
            )
    found = choose(names=settings.policies, budgets=settings.budgets(), splits=settings.layer_budgets)
    return with_attics(found, settings.recall_every) if settings.attic else found


def _refuse_one_shot(variants: Sequence[Variant], budget: int) -> None:
    for variant in variants:
        if isinstance(variant.make(budget), LayerBudgets):
            raise OptionError(
                f"{variant.name} has budgets by layer, and one-shot evicts from a cache that is the same for "
                "all layers: measure it with mode bounded",
                "mode",
            )


def _measure(
    model: str,
    settings: Settings,
    variants: Sequence[Variant],
    progress: Progress | None,
    *,
    is_fresh: bool = False,
) -> Report:
    check_lengths(model, settings.lengths, settings.n_batch)
    if settings.mode == "one-shot":
        _refuse_one_shot(variants, max(settings.budgets()))
    tasks = [task for task in settings.tasks if task != FIDELITY]
    cells = plan(
        variants, settings.kept, tasks, settings.lengths, n_samples=settings.n_samples,
        seed=settings.seed, mode=settings.mode, question=settings.question, n_batch=settings.n_batch,
    )  # fmt: skip
    about = environment(model)
    text = _text(settings.text)
    evaluator = Evaluator(ModelFile(model, settings.n_threads, settings.n_gpu_layers), text)
    fidelity: list[Reading] = []
    with closing(Store(settings.folder, evaluator.facts())) as store:
        n_read, n_left = 0, n_tokens_left(cells, store)

        def report(n: int, n_total: int) -> None:
            if progress is not None:
                progress(n, n_total)

        def report_text(n: int, n_total: int) -> None:
            nonlocal n_read
            n_read = n_total
            report(n, n_total + n_left)

        if FIDELITY in settings.tasks:
            n = max(settings.lengths)
            readers = [Reader(v, 1.0, n) for v in (Variant(FULL), *variants) if v.is_full]
            readers += [
                Reader(v, share, budget_of(share, n))
                for share in settings.kept
                for v in variants
                if not v.is_full
            ]
            fidelity = evaluator.fidelity(readers, n, settings.n_batch, store, report_text, is_fresh=is_fresh)
        order = {cell: i for i, cell in enumerate(cells)}
        new = run(cells, evaluator.answer, store, lambda n, n_total: report(n_read + n, n_read + n_total))
        results = sorted(new, key=lambda r: order[r.cell])
    return Report(
        environment=about,
        settings={name: readable(v) if isinstance(v, Path) else v for name, v in asdict(settings).items()},
        rows=tuple(summarize(results)),
        floors=tuple((*key, score) for key, score in floors(results).items()),
        fidelity=tuple(fidelity),
        recommendation=recommend(results, fidelity, settings.tolerance),
        results=tuple(results),
    )


def _text(path: Path | None) -> str | None:
    if path is None:
        return None
    with Document.open(path) as file:
        text = file.text()
    if not text.strip():
        raise OptionError(f"{str(path)!r} has no text in it: name another file, or leave it out", "text")
    return text

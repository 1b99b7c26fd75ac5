"""Answers cells with a model."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

from h2o_gguf.bindings import library_path
from h2o_gguf.evaluation.answering import answer_bounded
from h2o_gguf.evaluation.cells import Cell, Outcome
from h2o_gguf.evaluation.haystack import Haystack
from h2o_gguf.evaluation.opening import ModelFile
from h2o_gguf.evaluation.prompting import Prompt, Prompter
from h2o_gguf.evaluation.sample import Sample
from h2o_gguf.evaluation.tasks import make_sample
from h2o_gguf.sessions import fingerprint

__all__ = ["Evaluator"]


class Evaluator:
    """Answers with one model.  text : the haystack's, None: English that every Python has."""

    def __init__(self, model: ModelFile, text: str | None = None) -> None:
        self.model = model
        self._haystack = Haystack(text)
        self._text_sha256 = hashlib.sha256((text or "").encode()).hexdigest()
        self._samples: dict[tuple[Any, ...], tuple[Sample, Prompt]] = {}

    def facts(self) -> dict[str, Any]:
        """What every result depends on beside its cell.  Raises: ModelFileError."""
        return {
            "model": fingerprint(self.model.path),
            "runtime": fingerprint(str(library_path())),
            "n_threads": self.model.n_threads,
            "n_gpu_layers": self.model.n_gpu_layers,
            "text": self._text_sha256,
        }

    def answer(self, cells: Sequence[Cell]) -> Iterator[tuple[Cell, Outcome]]:
        """Answer a batch of the runner's, in one cache.

        Raises: OptionError, a length is too short for a task; and what the model raises.
        """
        first = cells[0]
        policy, variant = first.variant.make(first.budget), first.variant
        with self.model.open(policy, first.n_batch, variant.type_k, variant.type_v) as llm:
            prompter = Prompter.of(llm)
            for cell in cells:
                sample, prompt = self._sample(cell, prompter)
                yield cell, answer_bounded(llm, cell, sample, prompt)

    def _sample(self, cell: Cell, prompter: Prompter) -> tuple[Sample, Prompt]:
        key = cell.task, cell.length, cell.seed, cell.index
        if key not in self._samples:
            sample = make_sample(*key, self._haystack, prompter.count)
            self._samples[key] = sample, prompter.prompt(sample)
        return self._samples[key]

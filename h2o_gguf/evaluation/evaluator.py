"""Answers cells with a model."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING, Any

from h2o_gguf.benchmark.machine import environment
from h2o_gguf.bindings import library_path
from h2o_gguf.evaluation.answering import Asked, answer_bounded
from h2o_gguf.evaluation.cells import Cell, Outcome
from h2o_gguf.evaluation.haystack import Haystack
from h2o_gguf.evaluation.one_shot import answer_one_shot, sharing
from h2o_gguf.evaluation.opening import ModelFile
from h2o_gguf.evaluation.prompting import Prompt, Prompter
from h2o_gguf.evaluation.sample import Sample
from h2o_gguf.evaluation.side_by_side import Reader, Reading, read_side_by_side
from h2o_gguf.evaluation.sources import POLICIES, code_digest, policy_key, runtime_digest
from h2o_gguf.evaluation.store import Store
from h2o_gguf.evaluation.tasks import make_samples, reading_of
from h2o_gguf.evaluation.texts import prose
from h2o_gguf.fingerprint import fingerprint
from h2o_gguf.policies import Policy
from h2o_gguf.protocols import Progress

if TYPE_CHECKING:
    from h2o_gguf.llama import H2OLlama

__all__ = ["Evaluator"]


class Evaluator:
    """Answers with one model.  text : the haystack's, None: English that every Python has."""

    def __init__(self, model: ModelFile, text: str | None = None) -> None:
        self.model = model
        self.text = text if text is not None else prose()
        self._haystack = Haystack(self.text)
        self._samples: dict[tuple[Any, ...], tuple[Sample, Prompt]] = {}

    def facts(self) -> dict[str, Any]:
        """What every result depends on beside its cell.  Raises: ModelFileError."""
        machine = environment()
        return {
            "model": fingerprint(self.model.path),
            "code": code_digest(__name__, leave_out=POLICIES),
            "runtime": runtime_digest(library_path().parent),
            "machine": [machine["cpu"], machine["cores"]],
            "n_threads": self.model.n_threads,
            "n_gpu_layers": self.model.n_gpu_layers,
            "text": hashlib.sha256(self.text.encode()).hexdigest(),
        }

    def answer(self, cells: Sequence[Cell]) -> Iterator[tuple[Cell, Outcome]]:
        """Answer a batch of the runner's, in one cache.

        Raises: OptionError, a length is too short for a task; and what the model raises.
        """
        if cells[0].mode == "bounded":
            yield from self._bounded(cells)
        else:
            for group in sharing(cells):
                yield from self._one_shot(group)

    def _bounded(self, cells: Sequence[Cell]) -> Iterator[tuple[Cell, Outcome]]:
        first = cells[0]
        with self._open(cells, first.variant.make(first.budget)) as llm:
            for asked in self._by_text(cells, Prompter.of(llm)):
                yield from answer_bounded(llm, asked)

    def _one_shot(self, cells: Sequence[Cell]) -> Iterator[tuple[Cell, Outcome]]:
        """Cells that share a prefill, but for the sample."""
        first = cells[0]
        # The length is never reached: there is room for everything.
        with self._open(cells, first.variant.make(first.length)) as llm:
            for asked in self._by_text(cells, Prompter.of(llm)):
                yield from answer_one_shot(llm, asked)

    def _open(self, cells: Sequence[Cell], policy: Policy) -> H2OLlama:
        """With an attic if one of the cells has one."""
        with_attic = [cell.variant for cell in cells if cell.variant.attic]
        return self.model.open([*with_attic, cells[0].variant][0], policy, cells[0].n_batch)

    def _by_text(self, cells: Sequence[Cell], prompter: Prompter) -> Iterator[list[Asked]]:
        """The cells that ask about the same text, by text."""
        for _, same in groupby(sorted(cells, key=_text_key), key=_text_key):
            yield [Asked(cell, *self._sample(cell, prompter)) for cell in same]

    def fidelity(
        self,
        readers: Sequence[Reader],
        n_tokens: int,
        n_batch: int,
        store: Store,
        progress: Progress | None = None,
        *,
        is_fresh: bool = False,
    ) -> list[Reading]:
        """Every reader beside the full cache, which is the first; those of earlier runs are not read again.

        What was read together is stored before others are read.
        is_fresh : read all again if one is new, so that their speeds are of one run.
        """
        keys = [
            {
                "fidelity": asdict(r),
                "n": n_tokens,
                "b": n_batch,
                "policy": policy_key(r.variant.make(r.budget)),
            }
            for r in readers
        ]
        found = [store.get(key, Reading) for key in keys]
        todo = [i for i, value in enumerate(found) if value is None or i == 0 or is_fresh]
        if None in found:
            chosen = [readers[i] for i in todo]
            new = read_side_by_side(self.model, self.text, chosen, n_tokens, n_batch, progress)
            for i, each in zip(todo, new, strict=True):
                found[i] = each
                store.put(keys[i], each.as_dict())
        return [each for each in found if each is not None]

    def _sample(self, cell: Cell, prompter: Prompter) -> tuple[Sample, Prompt]:
        key = _sample_key(cell)
        if key not in self._samples:
            samples = make_samples(*key, self._haystack, prompter.count)
            self._samples |= {
                (task, *key[1:]): (sample, prompter.prompt(sample)) for task, sample in samples.items()
            }
        return self._samples[key]


def _text_key(cell: Cell) -> tuple[Any, ...]:
    is_own = cell.question == "seen"  # a text with its question
    return reading_of(cell.task), cell.length, cell.seed, cell.index, cell.task if is_own else ""


def _sample_key(cell: Cell) -> tuple[str, int, int, int]:
    return cell.task, cell.length, cell.seed, cell.index

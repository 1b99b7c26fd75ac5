"""The tasks by name, and their samples."""

from __future__ import annotations

import difflib
import random
from collections.abc import Callable, Iterable
from functools import partial

from h2o_gguf.errors import OptionError
from h2o_gguf.evaluation.chatting import fact_told
from h2o_gguf.evaluation.counting import common_words, frequent_words
from h2o_gguf.evaluation.haystack import Haystack
from h2o_gguf.evaluation.instructions import rules_kept
from h2o_gguf.evaluation.retrieval import grid, multikey, multiquery, multivalue, rivals, single
from h2o_gguf.evaluation.sample import Build, Sample, fit
from h2o_gguf.evaluation.tracking import open_folders, variable_chain

__all__ = ["FIDELITY", "GROUPS", "TASKS", "choose", "make_samples", "reading_of"]

Draw = Callable[[random.Random, Haystack], Build]
FIDELITY = "fidelity"  # no samples: a text that is read beside the full cache
GRID = (0, 25, 50, 75, 100)  # depths, in percent
RIVALS = {"rivals": False, "rivals-noise": True}  # whether they lie in noise
SHORT = 4096  # tokens below which ten words 30 times leave no room for others

TASKS: dict[str, Draw] = {
    "single-noise": partial(single, has_noise=True),
    "single-prose": partial(single, has_noise=False),
    "multikey": multikey,
    "multikey-uuid": partial(multikey, kind="uuid"),
    "multivalue": multivalue,
    "multiquery": multiquery,
    "variables": variable_chain,
    "common-words": common_words,
    "frequent-words": frequent_words,
    "instructions": rules_kept,
    "instructions-pinned": partial(rules_kept, pins_system=True),
    "stack": open_folders,
    "chat-fact": fact_told,
    **{f"grid-{depth:03}": partial(grid, depth=depth / 100) for depth in GRID},
    **{
        f"{name}-{depth:03}": partial(rivals, depths=[d / 100 for d in GRID], asked=i, has_noise=has_noise)
        for name, has_noise in RIVALS.items()
        for i, depth in enumerate(GRID)
    },
}
RULER = tuple(TASKS)[:9]
GROUPS: dict[str, tuple[str, ...]] = {
    "ruler": RULER,
    "grid": tuple(name for name in TASKS if name.startswith("grid-")),
    **{name: tuple(f"{name}-{depth:03}" for depth in GRID) for name in RIVALS},  # of one text
    "all": (*TASKS, FIDELITY),
}


def choose(names: Iterable[str]) -> tuple[str, ...]:
    """The tasks behind names of tasks and groups.  Raises: OptionError, one is unknown."""
    known = [*GROUPS, *TASKS, FIDELITY]
    found: dict[str, None] = {}
    for name in names:
        key = name.strip().lower().replace("_", "-")
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise OptionError(f"no task is called {name!r}: {hint}there are {', '.join(known)}", "task")
        found.update(dict.fromkeys(GROUPS.get(key, (key,))))
    return tuple(found)


def reading_of(task: str) -> str:
    """A name of how the texts of a task are read: tasks of the same name can ask after one reading."""
    return next((name for name in RIVALS if task in GROUPS[name]), task)


def text_of(task: str) -> str:
    """A name of the texts of a task, which others may have too."""
    return reading_of(task.removesuffix("-pinned"))


def make_samples(
    task: str,
    length: int,
    seed: int,
    index: int,
    haystack: Haystack,
    count: Callable[[Sample], int],
) -> dict[str, Sample]:
    """Sample number index of a task, and of those that ask about the same text, by task.

    They are the same for the same arguments, and of at most length tokens.
    count : tokens of a sample, its answer included.  Raises: OptionError, the length is too short.
    """
    name = text_of(task)
    draws = {each: draw for each, draw in TASKS.items() if text_of(each) == name}
    if task == "common-words" and length < SHORT:
        draws[task] = partial(common_words, n_times=10, n_others=1)
    builds = {each: draw(random.Random(f"{name} {seed} {index}"), haystack) for each, draw in draws.items()}
    return fit(
        lambda n: {each: build(n) for each, build in builds.items()},
        lambda samples: max(map(count, samples.values())),
        length,
        f"task {task!r}",
    )

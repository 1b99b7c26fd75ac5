"""How a budget is split over layers: PyramidKV's line, or by what each layer loses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from h2o_gguf.errors import BudgetError, OptionError
from h2o_gguf.policies.shares import whole

__all__ = ["N_CLASSES", "LeastLoss", "Pyramid", "Split", "pyramid"]

N_CLASSES = 5  # different budgets: each needs a cache of its own
Classes = Sequence[NDArray[np.int64]]  # the layers of each budget, the largest first


@runtime_checkable
class Split(Protocol):
    """Budgets that follow from a mean, once the layers are known."""

    @property
    def mean(self) -> int:
        """Entries per KV head, over all layers."""

    def over(self, layers: Sequence[int], floor: int) -> tuple[int, ...]:
        """Return a budget for each model layer; the mean is that or less, by less than one.

        floor : entries every layer gets, as far as the mean allows.

        Raises: OptionError, it is no split for these layers.
        """


@dataclass(frozen=True)
class Pyramid:
    """Budgets that fall linearly from the first layer to the last.  See pyramid for numbers and source."""

    mean: int
    beta: float = 20
    n_classes: int = N_CLASSES

    def __post_init__(self) -> None:
        pyramid(1, self.mean, 0, self.beta, self.n_classes)

    def over(self, layers: Sequence[int], floor: int) -> tuple[int, ...]:
        """Return a budget for each layer."""
        return pyramid(len(layers), self.mean, min(floor, self.mean), self.beta, self.n_classes)


@dataclass(frozen=True)
class LeastLoss:
    """Budgets with which all layers together lose least.

    layers : model layers. budgets : rising, >= 1. losses : of each layer at each of the budgets, >= 0, in a
    unit all layers share; between budgets they are taken to be linear, and to fall no faster later on.

    Raises: OptionError, the numbers contradict each other; BudgetError, the mean is larger than any budget.
    Source: ours.
    """

    mean: int
    layers: tuple[int, ...]
    budgets: tuple[int, ...]
    losses: tuple[tuple[float, ...], ...]
    n_classes: int = N_CLASSES

    def __post_init__(self) -> None:
        shape = (len(self.layers), len(self.budgets))
        losses = np.asarray([row if len(row) == shape[1] else () for row in self.losses], np.float64)
        is_rising = shape[1] > 0 and self.budgets[0] >= 1 and (np.diff(self.budgets) > 0).all()
        if losses.shape != shape or not losses.size or not is_rising or not (losses >= 0).all():
            raise OptionError(
                f"losses of {len(self.losses)} layers do not fit {shape[0]} layers and {shape[1]} budgets: "
                "they must be one number, 0 or more, for each layer and each of rising budgets",
                "layer_budgets",
            )
        whole("n_classes", self.n_classes, 1)
        if whole("the mean budget", self.mean, 1) > self.budgets[-1]:
            raise BudgetError(
                f"losses are known up to a budget of {self.budgets[-1]} entries, and the mean shall be "
                f"{self.mean}: calibrate on a longer text, or lower kv_budget",
                budget=self.mean,
            )

    def over(self, layers: Sequence[int], floor: int) -> tuple[int, ...]:
        """Return a budget for each layer.  Raises: OptionError, the losses are of other layers."""
        if tuple(layers) != self.layers:
            raise OptionError(
                f"losses are known of layers {', '.join(map(str, self.layers))}, but entries are evicted "
                f"from layers {', '.join(map(str, layers))}: calibrate this model",
                "layer_budgets",
            )
        low = min(max(floor, self.budgets[0]), self.mean)  # of less nothing is known
        wanted = self._filled(low)
        classes = _classes(wanted, self.n_classes)
        budgets = np.empty(len(layers), np.int64)
        for rows in classes:
            budgets[rows] = int(np.floor(wanted[rows].mean() + 1e-9))
        return tuple(int(budget) for budget in _fill(budgets, classes, self.mean * len(layers)))

    def _filled(self, low: int) -> NDArray[np.float64]:
        """Entries handed out where each saves most, from `low` on: float64[n_layer]."""
        grid = np.array([low, *(budget for budget in self.budgets if budget > low)], np.float64)
        steps = []
        for row, losses in enumerate(self.losses):
            falling = np.minimum.accumulate(np.interp(grid, self.budgets, losses))
            steps += [(-saved, row, n) for saved, n in _steps(grid, falling)]
        filled = np.full(len(self.layers), float(low))
        left = float((self.mean - low) * len(self.layers))
        for _, row, n in sorted(steps, key=lambda step: step[0]):
            filled[row] += min(n, left)
            left -= min(n, left)
        return filled


def _steps(grid: NDArray[np.float64], losses: NDArray[np.float64]) -> Iterator[tuple[float, float]]:
    """Loss saved by an entry, and entries, of each step along the lower convex envelope: falling, rising."""
    i = 0
    while i < len(grid) - 1:
        saved = (losses[i] - losses[i + 1 :]) / (grid[i + 1 :] - grid[i])
        best = float(saved.max())
        j = i + 1 + int(np.flatnonzero(saved == best)[-1])
        yield best, float(grid[j] - grid[i])
        i = j


def _classes(wanted: NDArray[np.float64], n_classes: int) -> Classes:
    """Layers in groups, largest first: those that differ least are joined until n_classes are left."""
    groups = [np.array([row]) for row in np.argsort(-wanted, kind="stable")]
    while len(groups) > n_classes:
        means = np.array([wanted[rows].mean() for rows in groups])
        sizes = np.array([rows.size for rows in groups])
        harm = np.diff(means) ** 2 * sizes[1:] * sizes[:-1] / (sizes[1:] + sizes[:-1])
        i = int(harm.argmin())
        groups[i : i + 2] = [np.concatenate(groups[i : i + 2])]
    return groups


def pyramid(
    n_layer: int, mean_budget: int, n_recent: int = 0, beta: float = 20, n_classes: int = N_CLASSES
) -> tuple[int, ...]:
    """Return budgets that fall linearly from the first layer to the last: n_layer of them.

    mean_budget : entries per KV head, over all layers; the budgets' mean is that or less, by less than one.
    n_recent : entries every layer gets before the rest is split, 0 .. mean_budget.
    beta : how steep, >= 1; of the rest, the last layer gets a beta-th of the mean.
    n_classes : different budgets, >= 1, each given to about as many layers: each needs a cache of its own.

    Raises: BudgetError, OptionError.
    Source: arXiv 2406.02069, section 4.2: m = B - w, low = m / beta, high = 2 m - low; steps are ours.
    """
    n_layer, n_classes = whole("n_layer", n_layer, 1), whole("n_classes", n_classes, 1)
    mean_budget, n_recent = whole("mean_budget", mean_budget, 1), whole("n_recent", n_recent, 0)
    if n_recent > mean_budget or not _is_steep(beta):
        raise OptionError(
            f"n_recent {n_recent} must be at most the mean budget {mean_budget}, and beta {beta} at least 1",
            "n_recent",
            "beta",
        )
    rest = mean_budget - n_recent
    low = rest / beta
    line = np.linspace(2 * rest - low, low, n_layer) if n_layer > 1 else np.array([float(rest)])
    classes = np.array_split(np.arange(n_layer), min(n_classes, n_layer))
    budgets = np.empty(n_layer, np.int64)
    for layers in classes:
        budgets[layers] = max(1, n_recent + int(np.floor(line[layers].mean() + 1e-9)))
    return tuple(int(budget) for budget in _fill(budgets, classes, mean_budget * n_layer))


def _is_steep(beta: Any) -> bool:
    is_number = isinstance(beta, int | float | np.floating) and not isinstance(beta, bool)
    return is_number and bool(1 <= beta < np.inf)


def _fill(budgets: NDArray[np.int64], classes: Classes, n_entries: int) -> NDArray[np.int64]:
    """Hand out what rounding left of n_entries, one to each layer of a class at a time."""
    for layers in classes:
        if budgets.sum() + layers.size > n_entries:
            break  # and not the ones above, which would then have less than these
        budgets[layers] += 1
    return budgets

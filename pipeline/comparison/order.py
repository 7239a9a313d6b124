"""Whether one group of runs is higher than another: a permutation test, exact where runs are few."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, product

import numpy as np

from metaloom.pipeline.comparison.scores import Scores, interquartile_mean, mean_score
from metaloom.pipeline.types import Array

SIGNIFICANCE = 0.05
MOST_EXACT = 20_000
"""Ways to divide the runs up to which all are tried; of more, so many are drawn."""


_CLOSE = 1e-12
"""How far apart the last bits may leave measures of equal divisions, of scores within -1 and 1."""


@dataclass(frozen=True)
class Permutations:
    """Outcome of a permutation test.

    Attributes:
        p: probability of a difference as large, if runs of both groups were alike.
        exact: whether all ways to divide the runs were tried.
        smallest: the smallest p there can be, with so many runs; larger than the significance, no runs would do.
    """

    p: float
    exact: bool
    smallest: float


def permutation_test(x: Scores, y: Scores, rng: np.random.Generator) -> Permutations:
    """Test whether the interquartile means of two groups differ, by dividing their runs anew.

    If runs of both groups are alike, all divisions of a stratum's runs into as many and as many are equally likely
    (Fisher 1935, The Design of Experiments, section 21), whatever their scores are distributed like. Whole runs change
    sides, with all their tasks. Of divisions with equal interquartile means, which know nothing of the outermost
    quarters, the means decide which is more extreme: else four runs and four could show nothing by one score each.
    """
    both = _standardized(x + y)
    ways = divisions(x, y)
    exact = ways <= MOST_EXACT
    sides = _all_sides(x, y) if exact else _drawn_sides(x, y, rng)
    differences, means = _apart(both, sides)
    (found,), (found_means,) = _apart(both, np.arange(len(both))[None] < len(x))
    equal = np.abs(differences - found) <= _CLOSE
    as_large = int(((~equal & (differences > found)) | (equal & (means >= found_means - _CLOSE))).sum())
    p = as_large / len(sides) if exact else (as_large + 1) / (len(sides) + 1)
    return Permutations(p, exact, smallest_p(x, y))


def divisions(x: Scores, y: Scores) -> int:
    """Ways to divide the runs of both groups into as many and as many."""
    counts = ((x.strata.count(name), y.strata.count(name)) for name in {*x.strata, *y.strata})
    return math.prod(math.comb(a + b, a) for a, b in counts)


def smallest_p(x: Scores, y: Scores) -> float:
    """The p of groups of which all runs of one are higher than all of the other.

    Groups of equal size have two such divisions, since all runs may change sides.
    """
    mirrored = all(x.strata.count(name) == y.strata.count(name) for name in {*x.strata, *y.strata})
    return (2 if mirrored else 1) / divisions(x, y)


def runs_needed(num_pairs: int, significance: float = SIGNIFICANCE) -> int:
    """The fewest runs of each of two groups with which one of so many pairs can be told apart."""
    return next(n for n in range(2, 100) if 2 / math.comb(2 * n, n) * num_pairs <= significance)


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p values of several tests, so that all claims hold together (Holm 1979, Scand. J. Statistics 6, p. 67).

    The i-th smallest of m is multiplied by m - i, counted from 0, and none is smaller than the one before it.
    """
    order = np.argsort(p_values, kind="stable")
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for i, place in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - i) * p_values[place]))
        adjusted[place] = largest
    return adjusted


def _standardized(scores: Scores) -> Scores:
    """The scores about 0 and within -1 and 1: of 10,000 and 10,001 the last bits would tell equal divisions apart.

    Scores that are apart by their last bits only, as means of equal returns may be, stay close to each other.
    """
    values = scores.ordered[0]
    middle = values.mean()
    reach = max(float(np.abs(values - middle).max()), 0.01 * float(np.abs(values).max())) or 1.0
    return Scores(tuple((run - middle) / reach for run in scores.runs), scores.strata, scores.same_tasks)


def _apart(both: Scores, sides: Array) -> tuple[Array, Array]:
    """How far the interquartile means, and the means, of both sides are apart in divisions [k, R], [k] each."""
    weights = _side_weights(both, sides), _side_weights(both, ~sides)
    a, b = (interquartile_mean(both, side) for side in weights)
    return np.abs(a - b), np.abs(mean_score(both, weights[0]) - mean_score(both, weights[1]))


def _all_sides(x: Scores, y: Scores) -> Array:
    """Every division, [k, R]: who stands on the side of x."""
    both = x + y
    choices = [list(combinations(both.places(name).tolist(), x.strata.count(name))) for name in both.stratum_names]
    rows: list[Array] = []
    for chosen in product(*choices):
        side = np.zeros(len(both), bool)
        side[[place for places in chosen for place in places]] = True
        rows.append(side)
    return np.array(rows)


def _drawn_sides(x: Scores, y: Scores, rng: np.random.Generator) -> Array:
    both = x + y
    sides = np.zeros((MOST_EXACT, len(both)), bool)
    for name in both.stratum_names:
        places = both.places(name)
        first = np.arange(len(places)) < x.strata.count(name)
        sides[:, places] = rng.permuted(np.tile(first, (MOST_EXACT, 1)), axis=1)
    return sides


def _side_weights(both: Scores, sides: Array) -> Array:
    """Weights [k, R] of the runs on one side: strata count the same, and so do the runs of each."""
    weights = np.zeros(sides.shape)
    names = both.stratum_names
    for name in names:
        places = both.places(name)
        here = sides[:, places]
        weights[:, places] = here / here.sum(axis=1, keepdims=True) / len(names)
    return weights

"""Comparison of groups of runs: measures with confidence intervals, and permutation tests."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product

import numpy as np

from metaloom.pipeline.comparison import intervals
from metaloom.pipeline.comparison.intervals import degrees_of_freedom, standard_error, student_interval
from metaloom.pipeline.comparison.scores import Scores, interquartile_mean, mean_score, performance_profile
from metaloom.pipeline.types import Array

SIGNIFICANCE = 0.05
MOST_EXACT = 20_000  # maximum number of divisions to enumerate; if there are more, this many are drawn at random


_CLOSE = 1e-12  # tolerance for rounding errors between equivalent divisions, for scores scaled to [-1, 1]


@dataclass(frozen=True)
class Permutations:
    """Outcome of a permutation test."""

    p: float  # probability of a difference at least this large if both groups had the same distribution
    exact: bool  # True if all divisions of the runs were enumerated
    smallest: float  # smallest p-value attainable with this number of runs


def permutation_test(x: Scores, y: Scores, rng: np.random.Generator) -> Permutations:
    """Test whether the interquartile means of two groups differ, by permuting their runs.

    Under the null hypothesis, all divisions of a stratum's runs into groups of these sizes are equally likely (Fisher
    1935, The Design of Experiments, section 21). Whole runs are permuted, with all their tasks. Ties between
    interquartile means are broken by the means; otherwise, a comparison of four runs with four others, with one score
    each, could never be significant.
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
    """Return the number of ways to divide the runs, stratum by stratum, into groups of these sizes."""
    counts = ((x.strata.count(name), y.strata.count(name)) for name in {*x.strata, *y.strata})
    return math.prod(math.comb(a + b, a) for a, b in counts)


def smallest_p(x: Scores, y: Scores) -> float:
    """Return the smallest attainable p-value, which occurs if all runs of one group score higher than all of the other.

    If the groups are of equal size in every stratum, there are two such divisions, one for each order.
    """
    mirrored = all(x.strata.count(name) == y.strata.count(name) for name in {*x.strata, *y.strata})
    return (2 if mirrored else 1) / divisions(x, y)


def runs_needed(num_pairs: int) -> int:
    """Return the minimum number of runs per group for a significant difference in one of `num_pairs` comparisons."""
    return next(n for n in range(2, 100) if 2 / math.comb(2 * n, n) * num_pairs <= SIGNIFICANCE)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values adjusted for multiple tests (Holm 1979, Scand. J. Statistics 6, p. 67).

    The i-th smallest of m, counted from 0, is multiplied by m - i and raised to at least the previous adjusted one.
    """
    values, m = np.array(p_values), len(p_values)
    order = np.argsort(values, kind="stable")
    adjusted = np.empty(m)
    adjusted[order] = np.maximum.accumulate(np.minimum((m - np.arange(m)) * values[order], 1))
    return adjusted.tolist()


def _standardized(scores: Scores) -> Scores:
    """Scale scores to [-1, 1], so that rounding errors of large scores do not make equivalent divisions differ.

    Scores that differ only in their last bits, such as means of equal returns, stay close to each other.
    """
    values = scores.ordered[0]
    middle = values.mean()
    reach = max(float(np.abs(values - middle).max()), 0.01 * float(np.abs(values).max())) or 1.0
    return Scores(tuple((run - middle) / reach for run in scores.runs), scores.strata, scores.same_tasks)


def _apart(both: Scores, sides: Array) -> tuple[Array, Array]:
    """Return the absolute differences in interquartile mean and in mean, [k] each, for divisions [k, R]."""
    weights = _side_weights(both, sides), _side_weights(both, ~sides)
    a, b = (interquartile_mean(both, side) for side in weights)
    return np.abs(a - b), np.abs(mean_score(both, weights[0]) - mean_score(both, weights[1]))


def _all_sides(x: Scores, y: Scores) -> Array:
    """Return all divisions of the runs into two groups, [k, R] bool, True for runs assigned to x."""
    both = x + y
    choices = [list(combinations(both.places(name).tolist(), x.strata.count(name))) for name in both.stratum_names]
    chosen = [[place for places in one for place in places] for one in product(*choices)]
    sides = np.zeros((len(chosen), len(both)), bool)
    np.put_along_axis(sides, np.array(chosen), True, axis=1)
    return sides


def _drawn_sides(x: Scores, y: Scores, rng: np.random.Generator) -> Array:
    both = x + y
    sides = np.zeros((MOST_EXACT, len(both)), bool)
    for name in both.stratum_names:
        places = both.places(name)
        first = np.arange(len(places)) < x.strata.count(name)
        sides[:, places] = rng.permuted(np.tile(first, (MOST_EXACT, 1)), axis=1)
    return sides


def _side_weights(both: Scores, sides: Array) -> Array:
    """Return run weights [k, R] for one side: equal across strata, and across the runs of each stratum."""
    weights = np.zeros(sides.shape)
    names = both.stratum_names
    for name in names:
        places = both.places(name)
        here = sides[:, places]
        weights[:, places] = here / here.sum(axis=1, keepdims=True) / len(names)
    return weights


@dataclass(frozen=True)
class Estimate:
    """A measure with its 95% confidence interval, whose ends are NaN if a stratum has only one run."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Band:
    """A measure along an axis, with pointwise 95% confidence intervals, [m] each."""

    values: Array
    low: Array
    high: Array


@dataclass(frozen=True)
class Pair:
    """Comparison of two groups, of which `a` has the higher interquartile mean."""

    a: str
    b: str
    difference: Estimate  # difference between their interquartile means
    improvement: Estimate  # probability that a run of a scores higher than a run of b
    test: Permutations
    adjusted_p: float  # p-value after Holm's correction for all pairs
    shown: bool  # True if a is significantly higher at the 5% level after the correction
    smallest_p: float  # smallest attainable adjusted p-value for this number of runs

    @property
    def attainable(self) -> bool:
        """True if a significant difference is attainable with this number of runs."""
        return self.smallest_p <= SIGNIFICANCE


class Resampled:
    """Groups with their bootstrap resamples. A group's resamples do not depend on other groups."""

    def __init__(self, groups: Mapping[str, Scores], seed: int, resamples: int) -> None:
        self.groups: Mapping[str, Scores] = groups
        self.seed: int = seed
        self._weights = {
            name: intervals.resampled_weights(scores, np.random.default_rng([seed, 0, *name.encode()]), resamples)
            for name, scores in groups.items()
        }

    def mean(self, name: str) -> Estimate:
        return self._estimate(name, mean_score)

    def interquartile_mean(self, name: str) -> Estimate:
        return self._estimate(name, interquartile_mean)

    def profile(self, name: str, thresholds: Array) -> Band:
        """Return the fraction of a group's scores above each threshold [m], with a confidence band."""
        scores = self.groups[name]
        values = performance_profile(scores, thresholds)
        band = self._band(scores, values, performance_profile(scores, thresholds, self._weights[name]))
        return Band(values, np.clip(band.low, 0, 1), np.clip(band.high, 0, 1))

    def curve(self, name: str, values: Array) -> Band:
        """Return the interquartile mean of values [R, m] over a group's R runs, with a confidence band."""
        group = self.groups[name]
        points = [Scores(tuple(column[:, None]), group.strata) for column in values.T]
        resampled = np.stack([interquartile_mean(point, self._weights[name]) for point in points], axis=1)
        return self._band(group, np.array([float(interquartile_mean(point)) for point in points]), resampled)

    def pairs(self) -> list[Pair]:
        """Return comparisons of all pairs of groups, with p-values corrected for the number of pairs."""
        names = sorted(self.groups, key=lambda name: (-float(interquartile_mean(self.groups[name])), name))
        chosen = [*combinations(names, 2)]
        tests: list[Permutations] = []
        for a, b in chosen:
            rng = np.random.default_rng([self.seed, 1, *min(a, b).encode(), 0, *max(a, b).encode()])
            tests.append(permutation_test(self.groups[a], self.groups[b], rng))
        adjusted, smallest = holm([test.p for test in tests]), holm([test.smallest for test in tests])
        found: list[Pair] = []
        for (a, b), test, p, least in zip(chosen, tests, adjusted, smallest, strict=True):
            x, y = self.groups[a], self.groups[b]
            improvement = Estimate(intervals.probability_of_improvement(x, y), *intervals.improvement_interval(x, y))
            found.append(Pair(a, b, self._difference(a, b), improvement, test, p, p <= SIGNIFICANCE, least))
        return found

    def _estimate(self, name: str, measure: Callable[..., Array]) -> Estimate:
        scores = self.groups[name]
        value, error = float(measure(scores)), self._error(name, measure)
        return Estimate(value, *student_interval(value, error, degrees_of_freedom(scores)))

    def _band(self, scores: Scores, values: Array, resampled: Array) -> Band:
        errors, degrees = standard_error(scores, resampled), degrees_of_freedom(scores)
        ends = [student_interval(float(v), float(e), degrees) for v, e in zip(values, errors, strict=True)]
        return Band(values, np.array([end.low for end in ends]), np.array([end.high for end in ends]))

    def _difference(self, a: str, b: str) -> Estimate:
        x, y = self.groups[a], self.groups[b]
        value = float(interquartile_mean(x) - interquartile_mean(y))
        errors = (self._error(a, interquartile_mean), self._error(b, interquartile_mean))
        degrees = intervals.welch_degrees(errors, (degrees_of_freedom(x), degrees_of_freedom(y)))
        return Estimate(value, *student_interval(value, float(np.hypot(*errors)), degrees))

    def _error(self, name: str, measure: Callable[..., Array]) -> float:
        return float(standard_error(self.groups[name], measure(self.groups[name], self._weights[name])))

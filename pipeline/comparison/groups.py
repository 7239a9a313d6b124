"""Groups of runs compared: every measure with its interval, and which order of the groups can be claimed."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from metaloom.pipeline.comparison.intervals import (
    Interval,
    degrees_of_freedom,
    improvement_interval,
    probability_of_improvement,
    resampled_weights,
    standard_error,
    student_interval,
    welch_degrees,
)
from metaloom.pipeline.comparison.order import SIGNIFICANCE, Permutations, holm, permutation_test
from metaloom.pipeline.comparison.scores import (
    Scores,
    interquartile_mean,
    mean_score,
    performance_profile,
)
from metaloom.pipeline.types import Array


@dataclass(frozen=True)
class Estimate:
    """A measure with the ends of its 95 % interval, NaN where one run of a stratum is all there is."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Band:
    """A measure along an axis: values, lower and upper ends of pointwise 95 % intervals, each [m]."""

    values: Array
    low: Array
    high: Array


@dataclass(frozen=True)
class Pair:
    """Two groups compared.

    Attributes:
        a, b: their names, that of the higher interquartile mean first.
        difference: of their interquartile means.
        improvement: probability that a run of a scores higher than one of b.
        test: of the difference.
        adjusted_p: its p for all pairs together, by Holm.
        shown: whether a is higher, at a significance of 5 % for all pairs together.
        smallest_p: the smallest adjusted p there can be with so many runs.
    """

    a: str
    b: str
    difference: Estimate
    improvement: Estimate
    test: Permutations
    adjusted_p: float
    shown: bool
    smallest_p: float

    @property
    def attainable(self) -> bool:
        """Whether any scores of so many runs could have shown it."""
        return self.smallest_p <= SIGNIFICANCE


class Resampled:
    """Groups with their resamples, drawn by position: that of a group does not depend on which others there are."""

    def __init__(self, groups: Mapping[str, Scores], seed: int, resamples: int) -> None:
        self.groups, self.seed = groups, seed
        self._weights = {
            name: resampled_weights(scores, np.random.default_rng([seed, 0, *name.encode()]), resamples)
            for name, scores in groups.items()
        }

    def mean(self, name: str) -> Estimate:
        """Mean score of a group."""
        return self._estimate(name, mean_score)

    def interquartile_mean(self, name: str) -> Estimate:
        """Interquartile mean of a group."""
        return self._estimate(name, interquartile_mean)

    def profile(self, name: str, thresholds: Array) -> Band:
        """Fractions of scores of a group above thresholds [m]."""
        scores = self.groups[name]
        values = performance_profile(scores, thresholds)
        band = self._band(scores, values, performance_profile(scores, thresholds, self._weights[name]))
        return Band(values, np.clip(band.low, 0, 1), np.clip(band.high, 0, 1))

    def curve(self, name: str, values: Array) -> Band:
        """Interquartile mean over a group's runs of values [R, m]."""
        group = self.groups[name]
        points = [Scores(tuple(column[:, None]), group.strata) for column in values.T]
        resampled = np.stack([interquartile_mean(point, self._weights[name]) for point in points], axis=1)
        return self._band(group, np.array([float(interquartile_mean(point)) for point in points]), resampled)

    def pairs(self) -> list[Pair]:
        """Every two groups compared."""
        names = sorted(self.groups, key=lambda name: (-float(interquartile_mean(self.groups[name])), name))
        chosen = [*combinations(names, 2)]
        tests: list[Permutations] = []
        for a, b in chosen:
            rng = np.random.default_rng([self.seed, 1, *min(a, b).encode(), 0, *max(a, b).encode()])
            tests.append(permutation_test(self.groups[a], self.groups[b], rng))
        adjusted, smallest = holm([test.p for test in tests]), holm([test.smallest for test in tests])
        return [
            Pair(
                a,
                b,
                self._difference(a, b),
                _with(
                    probability_of_improvement(self.groups[a], self.groups[b]),
                    improvement_interval(self.groups[a], self.groups[b]),
                ),
                test,
                p,
                shown=p <= SIGNIFICANCE,
                smallest_p=least,
            )
            for (a, b), test, p, least in zip(chosen, tests, adjusted, smallest, strict=True)
        ]

    def _estimate(self, name: str, measure: Callable[..., Array]) -> Estimate:
        scores = self.groups[name]
        error = standard_error(scores, measure(scores, self._weights[name]))
        value = float(measure(scores))
        return _with(value, student_interval(value, float(error), degrees_of_freedom(scores)))

    def _band(self, scores: Scores, values: Array, resampled: Array) -> Band:
        errors, degrees = standard_error(scores, resampled), degrees_of_freedom(scores)
        ends = [student_interval(float(v), float(e), degrees) for v, e in zip(values, errors, strict=True)]
        return Band(values, np.array([end.low for end in ends]), np.array([end.high for end in ends]))

    def _difference(self, a: str, b: str) -> Estimate:
        x, y = self.groups[a], self.groups[b]
        value = float(interquartile_mean(x) - interquartile_mean(y))
        errors = (self._error_of_iqm(a), self._error_of_iqm(b))
        degrees = welch_degrees(errors, (degrees_of_freedom(x), degrees_of_freedom(y)))
        return _with(value, student_interval(value, float(np.hypot(*errors)), degrees))

    def _error_of_iqm(self, name: str) -> float:
        scores = self.groups[name]
        return float(standard_error(scores, interquartile_mean(scores, self._weights[name])))


def _with(value: float, interval: Interval) -> Estimate:
    return Estimate(value, *interval)

"""Confidence intervals by a bootstrap that is stratified and draws whole runs."""

import math
from statistics import NormalDist
from typing import Literal, NamedTuple

import numpy as np

from metaloom.pipeline.comparison.scores import Scores
from metaloom.pipeline.types import Array

RESAMPLES = 2000
CONFIDENCE = 0.95

Kind = Literal["student", "percentile"]


class Interval(NamedTuple):
    """Ends of a confidence interval; NaN where there is none."""

    low: float
    high: float


NO_INTERVAL = Interval(math.nan, math.nan)


def resampled_weights(scores: Scores, rng: np.random.Generator, resamples: int = RESAMPLES) -> Array:
    """Weights [resamples, R] of the runs in groups drawn with replacement, stratum by stratum.

    Stratified as in arXiv:2108.13264, section 4.1, but for what is drawn: a run with all its tasks. Were the tasks of a
    run drawn by themselves, what a seed does to all of them would average out, and intervals come out too short.
    """
    weights = np.zeros((resamples, len(scores)))
    names = scores.stratum_names
    for name in names:
        places = scores.places(name)
        counts = rng.multinomial(len(places), np.full(len(places), 1 / len(places)), size=resamples)
        weights[:, places] = counts / (len(places) * len(names))
    return weights


def degrees_of_freedom(scores: Scores) -> int:
    """Runs beyond the first of each stratum: none where a single run says nothing about others."""
    counts = [scores.strata.count(name) for name in scores.stratum_names]
    return 0 if min(counts) < 2 else sum(counts) - len(counts)


def standard_error(scores: Scores, resampled: Array) -> Array:
    """Standard error [...] of a measure from its values [resamples, ...] in resamples; NaN if runs are too few.

    Resamples of R runs vary less than new groups of R runs would, in variance by (R - 1) / R, which is made good.
    """
    if not degrees_of_freedom(scores):
        return np.full(resampled.shape[1:], math.nan)
    fewest = min(scores.strata.count(name) for name in scores.stratum_names)
    return resampled.std(axis=0) * math.sqrt(fewest / (fewest - 1))


def student_interval(estimate: float, error: float, degrees: float) -> Interval:
    """Estimate +- t * standard error (Efron and Tibshirani 1993, An Introduction to the Bootstrap, section 12.2).

    With few runs it holds its confidence, which the percentiles of the resamples do not (docs/comparing.md has both,
    measured). Degrees of freedom are rounded down.
    """
    if degrees < 1 or not math.isfinite(error):
        return NO_INTERVAL
    reach = student_quantile((1 + CONFIDENCE) / 2, math.floor(degrees)) * error
    return Interval(estimate - reach, estimate + reach)


def percentile_interval(resampled: Array) -> Interval:
    """Percentiles of the values [resamples] in resamples, the interval of arXiv:2108.13264."""
    low, high = np.quantile(resampled, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Interval(float(low), float(high))


def welch_degrees(errors: tuple[float, float], degrees: tuple[int, int]) -> float:
    """Degrees of freedom of a difference of two estimates (Welch 1947, Biometrika 34, equation 28)."""
    if min(degrees) < 1:
        return 0
    a, b = errors[0] ** 2, errors[1] ** 2
    if not a + b:
        return min(degrees)
    return (a + b) ** 2 / (a**2 / degrees[0] + b**2 / degrees[1])


def student_quantile(probability: float, degrees: int) -> float:
    """The quantile of Student's t distribution, of a probability above a half."""
    if degrees > 10**4:  # where the two agree to four digits
        return NormalDist().inv_cdf(probability)
    low, high = 0.0, 1.0
    while student_cdf(high, degrees) < probability:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if student_cdf(middle, degrees) < probability else (low, middle)
    return (low + high) / 2


def student_cdf(t: float, degrees: int) -> float:
    """Probability that Student's t is at most `t` >= 0 (Abramowitz and Stegun 1964, 26.7.3 and 26.7.4)."""
    theta = math.atan(t / math.sqrt(degrees))
    sine, cosine = math.sin(theta), math.cos(theta)
    # The sums go over odd or even powers of the cosine, each term the last one times (k - 1) / k and its square.
    term, total = (cosine, 0.0) if degrees % 2 else (1.0, 0.0)
    for k in range(2 + degrees % 2, degrees + 1, 2):
        total += term
        term *= cosine**2 * (k - 1) / k
    within = 2 / math.pi * (theta + sine * total) if degrees % 2 else sine * total
    return 0.5 + within / 2

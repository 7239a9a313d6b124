"""Confidence intervals by a stratified bootstrap of whole runs, and the probability of improvement."""

import math
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from metaloom.pipeline.comparison.scores import Scores
from metaloom.pipeline.types import Array

RESAMPLES = 2000
CONFIDENCE = 0.95


class IntervalEnds(NamedTuple):
    """Ends of a confidence interval; NaN if there is no interval."""

    low: float
    high: float


NO_INTERVAL = IntervalEnds(math.nan, math.nan)


def resampled_weights(scores: Scores, rng: np.random.Generator, resamples: int = RESAMPLES) -> Array:
    """Return run weights [resamples, R] for bootstrap resamples drawn with replacement within each stratum.

    Follows arXiv:2108.13264, section 4.1, except that whole runs are drawn. Drawing tasks separately would average out
    a seed's effect on all tasks of a run, and intervals would be too narrow.
    """
    weights = np.zeros((resamples, len(scores)))
    names = scores.stratum_names
    for name in names:
        places = scores.places(name)
        counts = rng.multinomial(len(places), np.full(len(places), 1 / len(places)), size=resamples)
        weights[:, places] = counts / (len(places) * len(names))
    return weights


def degrees_of_freedom(scores: Scores) -> int:
    """Return the number of runs minus the number of strata, or 0 if a stratum has only one run."""
    counts = [scores.strata.count(name) for name in scores.stratum_names]
    return 0 if min(counts) < 2 else sum(counts) - len(counts)


def standard_error(scores: Scores, resampled: Array) -> Array:
    """Return the standard error [...] of a measure from its bootstrap values [resamples, ...]; NaN for too few runs.

    The bootstrap variance of R runs is too small by a factor of (R - 1) / R. The correction uses the smallest stratum.
    """
    if not degrees_of_freedom(scores):
        return np.full(resampled.shape[1:], math.nan)
    fewest = min(scores.strata.count(name) for name in scores.stratum_names)
    return resampled.std(axis=0) * math.sqrt(fewest / (fewest - 1))


def student_interval(estimate: float, error: float, degrees: float) -> IntervalEnds:
    """Return estimate ± t · standard error (Efron and Tibshirani 1993, An Introduction to the Bootstrap, section 12.2).

    Unlike bootstrap percentile intervals, it has the right coverage with few runs; docs/comparing.md has measurements.
    Degrees of freedom are rounded down.
    """
    if degrees < 1 or not math.isfinite(error):
        return NO_INTERVAL
    reach = student_quantile((1 + CONFIDENCE) / 2, math.floor(degrees)) * error
    return IntervalEnds(estimate - reach, estimate + reach)


def welch_degrees(errors: tuple[float, float], degrees: tuple[int, int]) -> float:
    """Return the degrees of freedom for a difference between two estimates (Welch 1947, Biometrika 34, equation 28)."""
    a, b = errors[0] ** 2, errors[1] ** 2
    if min(degrees) < 1 or not a + b:
        return min(degrees)
    return (a + b) ** 2 / (a**2 / degrees[0] + b**2 / degrees[1])


def student_quantile(probability: float, degrees: int) -> float:
    """Return the quantile of Student's t distribution for a probability above 1/2."""
    if degrees > 10**4:  # the normal quantile agrees to four digits
        return NormalDist().inv_cdf(probability)
    low, high = 0.0, 1.0
    while student_cdf(high, degrees) < probability:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if student_cdf(middle, degrees) < probability else (low, middle)
    return (low + high) / 2


def student_cdf(t: float, degrees: int) -> float:
    """Return the probability that Student's t is at most `t` >= 0 (Abramowitz and Stegun 1964, 26.7.3 and 26.7.4)."""
    theta = math.atan(t / math.sqrt(degrees))
    sine, cosine = math.sin(theta), math.cos(theta)
    # Sums over odd or even powers of the cosine; each term is the last times (k - 1) / k and the squared cosine.
    term, total = (cosine, 0.0) if degrees % 2 else (1.0, 0.0)
    for k in range(2 + degrees % 2, degrees + 1, 2):
        total += term
        term *= cosine**2 * (k - 1) / k
    within = 2 / math.pi * (theta + sine * total) if degrees % 2 else sine * total
    return 0.5 + within / 2


def probability_of_improvement(x: Scores, y: Scores) -> float:
    """Return the probability that a run of x scores higher than a run of y in the same stratum; ties count half.

    arXiv:2108.13264, section 4.3: the Mann-Whitney statistic P(X_m > Y_m), averaged over m. If both groups were tested
    on the same tasks, m is a task; otherwise runs are compared by their mean scores. Raises ValueError if the groups
    have different strata.
    """
    return float(np.mean([wins.mean() for wins in _wins(x, y)]))


def improvement_interval(x: Scores, y: Scores) -> IntervalEnds:
    """Return the 95% confidence interval of the probability of improvement; NaN if a stratum has a single run.

    Newcombe's score interval for the Mann-Whitney statistic (2006, Statistics in Medicine 25, p. 559, method 5): all p
    at most t standard errors from the observed probability, with the standard error evaluated at p. It stays within
    [0, 1] and is defined even if all runs of one group score higher.

    The paper assumes one score per run. Runs compared task by task vary less, so the interval is narrowed by a factor
    based on DeLong's variance (1988, Biometrics 44, p. 837). t is a quantile of Student's distribution with Welch's
    degrees of freedom for the two parts of that variance, rounded down.
    """
    if not min(degrees_of_freedom(x), degrees_of_freedom(y)):
        return NO_INTERVAL
    found, all_wins = probability_of_improvement(x, y), _wins(x, y)
    sizes, degrees = [wins.shape for wins in all_wins], _delong(all_wins)[1]
    # A few runs may agree by chance, especially if one group is nearly always higher. Add one run to each group that
    # ties with all others, as Agresti and Coull 1998 do for proportions, without increasing the variance.
    with_ties = [np.pad(wins, (0, 1), constant_values=0.5) for wins in all_wins]
    factor = max(_share_of_newcombe(wins, sizes) for wins in (all_wins, with_ties))
    # Whole degrees may come out slightly too small, such as 7.999..., depending on the order of groups.
    reach = student_quantile((1 + CONFIDENCE) / 2, math.floor(degrees * (1 + 1e-12))) * math.sqrt(factor)

    def end(outside: float) -> float:
        inside = found
        for _ in range(60):
            middle = (inside + outside) / 2
            if abs(found - middle) <= reach * math.sqrt(_newcombe(middle, sizes)):
                inside = middle
            else:
                outside = middle
        return inside

    return IntervalEnds(end(0.0), end(1.0))


def _share_of_newcombe(all_wins: list[Array], sizes: list[tuple[int, ...]]) -> float:
    """Return the ratio of DeLong's variance to Newcombe's at the same probability, at most 1; 1 if undefined."""
    variance, expected = _delong(all_wins)[0], _newcombe(float(np.mean([wins.mean() for wins in all_wins])), sizes)
    return min(1.0, variance / expected) if variance > 1e-12 and expected else 1.0


def _wins(x: Scores, y: Scores) -> list[Array]:
    """Return, for each stratum, the share of tasks on which each run of x beats each run of y, [R_x, R_y]."""
    if x.stratum_names != y.stratum_names:
        raise ValueError(f"got strata {x.stratum_names} and {y.stratum_names}; both groups must have the same strata")
    by_task = x.same_tasks and y.same_tasks and (x + y).same_tasks
    found: list[Array] = []
    for name in x.stratum_names:
        if by_task:
            a, b = np.array(x.of_stratum(name)), np.array(y.of_stratum(name))
        else:
            a, b = x.run_means[x.places(name)][:, None], y.run_means[y.places(name)][:, None]
        found.append((0.5 * (np.sign(a[:, None] - b[None]) + 1)).mean(axis=-1))
    return found


def _newcombe(p: float, sizes: list[tuple[int, ...]]) -> float:
    """Return Newcombe's variance of the mean Mann-Whitney statistic over strata of m and n runs, with expectation p."""

    def of(m: int, n: int) -> float:
        others = (m + n) / 2 - 1
        return p * (1 - p) / (m * n) * (1 + others * ((1 - p) / (2 - p) + p / (1 + p)))

    return sum(of(m, n) for m, n in sizes) / len(sizes) ** 2


def _delong(all_wins: list[Array]) -> tuple[float, float]:
    """Return DeLong's variance of the mean statistic over strata, and its degrees of freedom."""
    means = [(wins.mean(axis), wins.shape[1 - axis]) for wins in all_wins for axis in (0, 1)]
    variances = np.array([of_runs.var(ddof=1) / n for of_runs, n in means]) / len(all_wins) ** 2
    if not variances.any():
        return 0.0, sum(n - 1 for _, n in means)
    total = variances.sum()
    return float(total), float(total**2 / sum(v**2 / (n - 1) for v, (_, n) in zip(variances, means, strict=True)))

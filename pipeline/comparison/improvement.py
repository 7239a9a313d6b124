"""Probability of improvement: how often a run of one group scores higher than one of another, and how sure that is."""

import math

import numpy as np

from metaloom.pipeline.comparison.intervals import (
    CONFIDENCE,
    NO_INTERVAL,
    Interval,
    degrees_of_freedom,
    student_quantile,
)
from metaloom.pipeline.comparison.scores import Scores
from metaloom.pipeline.types import Array


def probability_of_improvement(x: Scores, y: Scores) -> float:
    """Probability that a run of x scores higher than one of y in the same stratum; ties count half.

    arXiv:2108.13264, section 4.3: the Mann-Whitney statistic P(X_m > Y_m), averaged over m. Where both were tested on
    the same tasks, m is a task; else runs are compared by their mean scores.

    Raises:
        ValueError: the groups have different strata.
    """
    return float(np.mean([wins.mean() for wins in _wins(x, y)]))


def improvement_interval(x: Scores, y: Scores) -> Interval:
    """95 % interval of the probability of improvement, for new runs; none where a stratum has a single run of a group.

    A score interval as Newcombe's for the Mann-Whitney statistic (2006, Statistics in Medicine 25, p. 559, method 5):
    those probabilities p for which the one that was found is at most t standard errors away, taken at p. It stays
    between 0 and 1, and is there where all runs of one group are higher too.

    Differs from the paper, whose variance is that of one score per run: runs that are compared task by task vary less,
    by a factor that DeLong's variance tells (1988, Biometrics 44, p. 837). t is Student's, by Welch's degrees
    of freedom of the two parts of that variance, rounded down.
    """
    if not min(degrees_of_freedom(x), degrees_of_freedom(y)):
        return NO_INTERVAL
    found, all_wins = probability_of_improvement(x, y), _wins(x, y)
    sizes, degrees = [wins.shape for wins in all_wins], _delong(all_wins)[1]
    # Few runs may agree by chance, above all where one group is nearly always higher: one more of each, which ties with
    # all others (as Agresti and Coull 1998 have it for proportions), is not to make them vary more.
    with_ties = [np.pad(wins, (0, 1), constant_values=0.5) for wins in all_wins]
    factor = max(_share_of_newcombe(wins, sizes) for wins in (all_wins, with_ties))
    # Whole degrees may come out a little too small: 7.999..., for one group in place of the other.
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

    return Interval(end(0.0), end(1.0))


def _share_of_newcombe(all_wins: list[Array], sizes: list[tuple[int, ...]]) -> float:
    """DeLong's variance as a share of Newcombe's at the same probability: 1 at most, and where there is none."""
    variance, expected = _delong(all_wins)[0], _newcombe(float(np.mean([wins.mean() for wins in all_wins])), sizes)
    return min(1.0, variance / expected) if variance > 1e-12 and expected else 1.0


def _wins(x: Scores, y: Scores) -> list[Array]:
    """Of every stratum, [R_x, R_y], how often a run of x is higher than one of y, over tasks."""
    if x.stratum_names != y.stratum_names:
        raise ValueError(f"found strata {x.stratum_names} and {y.stratum_names}; required the same")
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
    """Variance of the mean of Mann-Whitney statistics of strata of m and n runs, if each has the expectation p."""

    def of(m: int, n: int) -> float:
        others = (m + n) / 2 - 1
        return p * (1 - p) / (m * n) * (1 + others * ((1 - p) / (2 - p) + p / (1 + p)))

    return sum(of(m, n) for m, n in sizes) / len(sizes) ** 2


def _delong(all_wins: list[Array]) -> tuple[float, float]:
    """Variance of the mean over strata, and its degrees of freedom; with none, those of the runs of both groups."""
    means = [(wins.mean(axis), wins.shape[1 - axis]) for wins in all_wins for axis in (0, 1)]
    variances = np.array([of_runs.var(ddof=1) / n for of_runs, n in means]) / len(all_wins) ** 2
    if not variances.any():
        return 0.0, sum(n - 1 for _, n in means)
    total = variances.sum()
    return float(total), float(total**2 / sum(v**2 / (n - 1) for v, (_, n) in zip(variances, means, strict=True)))

"""Computed references for Bernoulli bandits: returns of known strategies, to be drawn beside learned ones.

A strategy sees counts alone: how often every arm was pulled and how often it paid. Probabilities are U(0, 1), so after
s payouts in n pulls an arm's posterior is Beta(1 + s, 1 + n - s).
"""

from collections.abc import Callable, Mapping
from functools import lru_cache

import numpy as np

from metaloom.pipeline.types import Array

Strategy = Callable[[Array, Array, int, np.random.Generator], Array]
"""Scores [N, k] of the arms, from pulls and payouts [N, k] and the number of pulls that remain; the highest is pulled,
one of several by chance."""


def random_scores(pulls: Array, payouts: Array, remaining: int, rng: np.random.Generator) -> Array:
    """Score all arms equally: any may be pulled."""
    return np.zeros(pulls.shape)


def greedy_scores(pulls: Array, payouts: Array, remaining: int, rng: np.random.Generator) -> Array:
    """Score arms by the mean of the posterior."""
    return (1 + payouts) / (2 + pulls)


def thompson_scores(pulls: Array, payouts: Array, remaining: int, rng: np.random.Generator) -> Array:
    """Score arms by a draw from the posterior. Thompson 1933."""
    return rng.beta(1 + payouts, 1 + pulls - payouts)


def ucb1_scores(pulls: Array, payouts: Array, remaining: int, rng: np.random.Generator) -> Array:
    """Return x̄ + √(2 ln t / n); unpulled arms come first. Auer et al. 2002, Machine Learning 47, figure 1."""
    with np.errstate(divide="ignore", invalid="ignore"):
        bonus = np.sqrt(2 * np.log(pulls.sum(1, keepdims=True)) / pulls)
        return np.where(pulls == 0, np.inf, payouts / pulls + bonus)


def gittins_scores(pulls: Array, payouts: Array, remaining: int, rng: np.random.Generator) -> Array:
    """Return the Gittins index for the pulls that remain; see `gittins_indices`."""
    t = int(pulls[0].sum())
    return gittins_indices(t + remaining)[payouts, pulls - payouts, remaining]


REFERENCES: Mapping[str, Strategy] = {
    "random": random_scores,
    "greedy": greedy_scores,
    "thompson": thompson_scores,
    "ucb1": ucb1_scores,
    "gittins": gittins_scores,
}
"""Strategies by name."""


@lru_cache(maxsize=4)
def gittins_indices(horizon: int, *, num_levels: int = 1000) -> Array:
    """Return Gittins indices [s, f, m] of an arm after s payouts and f misses, with m pulls to come, of `horizon`.

    The index is the sure payout λ per pull for which one would as soon leave the arm for good: the largest λ on a grid
    with V(s, f, m) > mλ, where V(s, f, m) = max(mλ, p (1 + V(s+1, f, m-1)) + (1 - p) V(s, f+1, m-1)), p = (1 + s) /
    (2 + s + f) (Gittins 1979 for a finite horizon; Bradt, Johnson and Karlin 1956). For two arms or more it is not
    quite optimal then, but very nearly.
    """
    levels = (np.arange(num_levels) + 0.5) / num_levels
    size = horizon + 1
    indices = np.zeros((size, size, size))
    after = np.zeros((num_levels, size + 1, size + 1))
    s, f = np.arange(size)[:, None], np.arange(size)[None]
    p = (1 + s) / (2 + s + f)
    for m in range(1, size):
        sure = m * levels[:, None, None]
        pulled = p * (1 + after[:, 1:, :-1]) + (1 - p) * after[:, :-1, 1:]
        indices[:, :, m] = (pulled > sure).mean(0)
        after[:, :-1, :-1] = np.maximum(pulled, sure)
    return indices


def earned(strategy: Strategy, probabilities: Array, num_pulls: int, rng: np.random.Generator) -> Array:
    """Return a strategy's total payouts [N] in `num_pulls` pulls of N bandits [N, k]."""
    N, k = probabilities.shape
    pulls, payouts = np.zeros((N, k), np.int64), np.zeros((N, k), np.int64)
    rows = np.arange(N)
    for t in range(num_pulls):
        scores = strategy(pulls, payouts, num_pulls - t, rng)
        best = scores == scores.max(1, keepdims=True)
        arms = np.where(best, rng.random((N, k)), -1).argmax(1)
        pulls[rows, arms] += 1
        payouts[rows, arms] += rng.random(N) < probabilities[rows, arms]
    return payouts.sum(1)


def reference_return(
    name: str, *, arms: int, num_pulls: int, num_bandits: int = 100_000, seed: int = 0
) -> tuple[float, float]:
    """Return a reference's mean payout in bandits with probabilities from U(0, 1), and its standard error."""
    rng = np.random.default_rng(seed)
    returns = earned(REFERENCES[name], rng.uniform(0, 1, (num_bandits, arms)), num_pulls, rng)
    return float(returns.mean()), float(returns.std() / np.sqrt(num_bandits))

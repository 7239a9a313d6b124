"""Computed references for tabular MDPs: returns of known strategies, to be drawn beside learned ones.

A strategy knows the prior: mean rewards N(1, 1) seen through noise N(0, 1), next states Dirichlet(1, ..., 1). So after
n visits of a state and action with rewards r the mean reward is N((1 + Σ r) / (1 + n), 1 / (1 + n)), and the next state
Dirichlet(1 + counts). Before every episode, or every step, a strategy plans what is left of it, by dynamic programming.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from metaloom.pipeline.envs.tabular_mdp import Tables
from metaloom.pipeline.types import Array

EPSILON = 0.1
"""Share of random actions of the epsilon-greedy strategy."""


@dataclass
class Evidence:
    """Observed rewards and transitions of N processes.

    Attributes:
        rewards: [N, S, A] sums of rewards.
        counts: [N, S, A, S] transitions.
    """

    rewards: Array
    counts: Array

    @property
    def visits(self) -> Array:
        """Number of visits, [N, S, A]."""
        return self.counts.sum(-1)

    def mean(self) -> Tables:
        """Return the means of the posterior."""
        return Tables((1 + self.rewards) / (1 + self.visits), _normalized(1.0 + self.counts))

    def draw(self, rng: np.random.Generator) -> Tables:
        """Draw processes from the posterior."""
        visits = self.visits
        means = (1 + self.rewards) / (1 + visits) + rng.standard_normal(visits.shape) / np.sqrt(1 + visits)
        return Tables(means, _normalized(rng.standard_gamma(1.0 + self.counts)))


Strategy = Callable[[Evidence, Tables, int, np.random.Generator], Array]
"""Action values [N, H, S, A] for H steps, from the evidence, the true processes, the horizon and a generator."""


def plan(tables: Tables, horizon: int) -> Array:
    """Return the optimal action values [N, H, S, A] of known processes, h steps after the start."""
    N, S, A = tables.means.shape
    values, q = np.zeros((N, S)), np.empty((N, horizon, S, A))
    flat = tables.transitions.reshape(N, S * A, S)
    for h in reversed(range(horizon)):
        q[:, h] = tables.means + (flat @ values[..., None]).reshape(N, S, A)
        values = q[:, h].max(-1)
    return q


def known(evidence: Evidence, tables: Tables, horizon: int, rng: np.random.Generator) -> Array:
    """Plan with the true process: the upper bound."""
    return plan(tables, horizon)


def any_action(evidence: Evidence, tables: Tables, horizon: int, rng: np.random.Generator) -> Array:
    """Act at random."""
    N, S, A = tables.means.shape
    return rng.random((N, horizon, S, A))


def greedy(evidence: Evidence, tables: Tables, horizon: int, rng: np.random.Generator) -> Array:
    """Plan in the mean of the posterior."""
    return plan(evidence.mean(), horizon)


def epsilon_greedy(evidence: Evidence, tables: Tables, horizon: int, rng: np.random.Generator) -> Array:
    """Plan as the greedy strategy, but act at random in one of ten states on average."""
    values = greedy(evidence, tables, horizon, rng)
    elsewhere = rng.random(values.shape[:-1]) < EPSILON
    return np.where(elsewhere[..., None], rng.random(values.shape), values)


def psrl(evidence: Evidence, tables: Tables, horizon: int, rng: np.random.Generator) -> Array:
    """Plan in one draw from the posterior. Strens 2000; Osband, Russo and Van Roy 2013, arXiv:1306.0940."""
    return plan(evidence.draw(rng), horizon)


def opsrl(evidence: Evidence, tables: Tables, horizon: int, rng: np.random.Generator) -> Array:
    """Plan in one draw whose mean rewards are no lower than the posterior's: optimistic sampling (May et al. 2012)."""
    drawn = evidence.draw(rng)
    return plan(Tables(np.maximum(drawn.means, evidence.mean().means), drawn.transitions), horizon)


REFERENCES: Mapping[str, Strategy] = {
    "random": any_action,
    "epsilon-greedy": epsilon_greedy,
    "greedy": greedy,
    "psrl": psrl,
    "opsrl": opsrl,
    "known": known,
}
"""Strategies by name."""


def earned(
    strategy: Strategy, tables: Tables, *, episodes: int, horizon: int, rng: np.random.Generator, replan: bool = False
) -> Array:
    """Return the sums of rewards of a strategy in N processes, [N, episodes].

    Args:
        strategy: Strategy to evaluate.
        tables: [N, ...] the processes.
        episodes: Episodes in each process.
        horizon: Steps of an episode.
        rng: Generator of the random draws.
        replan: Plan before every step, with what the episode has shown so far, not before every episode.
    """
    N, S, A = tables.means.shape
    evidence = Evidence(np.zeros((N, S, A)), np.zeros((N, S, A, S)))
    below = np.cumsum(tables.transitions, axis=-1)[..., :-1]
    rows, returns = np.arange(N), np.zeros((N, episodes))
    for episode in range(episodes):
        actions, planned = np.empty(0), 0
        states = np.zeros(N, np.int64)
        for h in range(horizon):
            if replan or h == 0:
                actions, planned = strategy(evidence, tables, horizon - h, rng).argmax(-1), h
            at = rows, states, actions[rows, h - planned, states]
            rewards = tables.means[at] + rng.standard_normal(N)
            states = (rng.random(N)[:, None] >= below[at]).sum(-1)
            returns[:, episode] += rewards
            evidence.rewards[at] += rewards
            evidence.counts[(*at, states)] += 1
    return returns


def random_tables(num_mdps: int, rng: np.random.Generator, *, states: int = 10, actions: int = 5) -> Tables:
    """Draw N processes as tasks are drawn."""
    means = rng.normal(1, 1, (num_mdps, states, actions))
    return Tables(means, rng.dirichlet(np.ones(states), (num_mdps, states, actions)))


def reference_return(
    name: str, *, episodes: int, horizon: int = 10, num_mdps: int = 1000, seed: int = 0, replan: bool = False
) -> tuple[float, float]:
    """Return a reference's mean return in all episodes of a process, over random processes, and its standard error.

    See `earned`.
    """
    rng = np.random.default_rng(seed)
    tables = random_tables(num_mdps, rng)
    totals = earned(REFERENCES[name], tables, episodes=episodes, horizon=horizon, rng=rng, replan=replan).sum(1)
    return float(totals.mean()), float(totals.std() / np.sqrt(num_mdps))


def _normalized(weights: Array) -> Array:
    return weights / weights.sum(-1, keepdims=True)

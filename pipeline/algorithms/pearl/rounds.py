"""Which episodes an iteration collects of every task, by what belief, and which of them are context."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Round:
    """Episodes of a task that are collected under one belief about it.

    Attributes:
        episodes: how many, each with a latent variable of its own.
        from_posterior: the belief is the posterior given the context so far; otherwise it is the prior.
        in_context: tasks are inferred from these episodes; otherwise actor and critics alone learn from them.
    """

    episodes: int
    from_posterior: bool
    in_context: bool


def episodes_of(num_steps: int, max_episode_steps: int) -> int:
    """Episodes in which there are so many steps if none ends early."""
    return -(-num_steps // max_episode_steps)


def posterior_rounds(episodes: int, update_every: int, *, in_context: bool) -> Iterator[Round]:
    """Rounds of a phase that infers the task after every few episodes; the first knows the prior alone."""
    for start in range(0, episodes, update_every):
        yield Round(min(update_every, episodes - start), from_posterior=start > 0, in_context=in_context)

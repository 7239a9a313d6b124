"""Episodes as single transitions."""

from collections.abc import Sequence
from dataclasses import fields

import numpy as np

from pipeline.types import Array, EpisodeBatch, Transitions


def transitions_of(episodes: EpisodeBatch, b: int) -> Transitions:
    """[n], the real steps of task b, episode by episode in order of time."""
    real = episodes.mask[b] != 0
    steps = np.arange(1, real.shape[1] + 1)
    ends = (steps == episodes.lengths[b][:, None]) & episodes.terminated[b][:, None]
    return Transitions(
        observations=episodes.observations[b][:, :-1][real],
        actions=episodes.actions[b][real],
        rewards=episodes.rewards[b][real],
        next_observations=episodes.observations[b][:, 1:][real],
        terminated=ends[real],
    )


def concatenate(parts: Sequence[Transitions]) -> Transitions:
    """[n], all transitions of the parts [n_i] in their order."""
    return Transitions(
        **{f.name: np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(Transitions)}
    )


def taken(transitions: Transitions, places: Array) -> Transitions:
    """[...], the transitions at some places [...] of [n]."""
    return Transitions(**{f.name: getattr(transitions, f.name)[places] for f in fields(Transitions)})

"""Counters that a learner keeps over a whole run."""

from collections.abc import Mapping, Sequence

import numpy as np

from metaloom.pipeline.types import EpisodeBatch, LearnerState, Params, Update

ENV_STEPS = "env_steps"
"""Environment steps made so far."""

ENV_STEPS_NOMINAL = "env_steps_nominal"
"""Environment steps there would have been if no episode had ended before its step limit."""


def no_steps() -> Params:
    """The counters before the first episode."""
    return {name: np.zeros((), np.int64) for name in (ENV_STEPS, ENV_STEPS_NOMINAL)}


def finished(
    state: LearnerState, updated: LearnerState, rounds: Sequence[EpisodeBatch], metrics: Mapping[str, float]
) -> Update:
    """An update with the counters of its learner after the episodes of some rounds, which are metrics too."""
    counters = counted(state, rounds)
    numbers = {name: float(count) for name, count in counters.items()}
    return Update(LearnerState(updated.params, updated.optimizer, updated.extra | counters), {**metrics, **numbers})


def counted(learner: LearnerState, rounds: Sequence[EpisodeBatch]) -> Params:
    """The counters after the episodes of some rounds."""
    made = sum(episodes.num_steps for episodes in rounds)
    nominal = sum(int(episodes.real.sum()) * episodes.rewards.shape[2] for episodes in rounds)
    return {
        ENV_STEPS: np.array(int(learner.extra[ENV_STEPS]) + made, np.int64),
        ENV_STEPS_NOMINAL: np.array(int(learner.extra[ENV_STEPS_NOMINAL]) + nominal, np.int64),
    }

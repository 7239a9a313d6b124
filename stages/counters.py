"""Counters that a learner keeps over a whole run."""

from collections.abc import Sequence

import numpy as np

from metaloom.pipeline.types import EpisodeBatch, LearnerState, Metrics, Params, Update
from metaloom.stages.faults import StageFault

ENV_STEPS = "env_steps"
"""Environment steps made so far."""

ENV_STEPS_NOMINAL = "env_steps_nominal"
"""Environment steps there would have been if no episode had ended before its step limit."""


def no_steps() -> Params:
    """The counters before the first episode."""
    return {name: np.zeros((), np.int64) for name in (ENV_STEPS, ENV_STEPS_NOMINAL)}


def finished(
    state: LearnerState, updated: LearnerState, rounds: Sequence[EpisodeBatch], metrics: Metrics, of_update: Metrics
) -> Update:
    """An update with the counters of its learner after the episodes of some rounds, which are metrics too.

    Raises:
        StageFault: the learner gave parameters of another form, with which no iteration could begin, or metrics under
            names that the run always has.
    """
    before, after = (_forms(learner.params) for learner in (state, updated))
    if other := sorted(name for name in before | after if before.get(name) != after.get(name)):
        found, required = (form.get(other[0], "absent") for form in (after, before))
        raise StageFault(f"the update gave params[{other[0]!r}] as {found}; required {required}, as it was before")
    counters = counted(state, rounds)
    numbers = {name: float(count) for name, count in counters.items()}
    if taken := sorted((metrics | numbers).keys() & of_update.keys()):
        raise StageFault(
            f"the update gave the metrics {', '.join(taken)}, which every run has; return them under other names"
        )
    learner = LearnerState(updated.params, updated.optimizer, updated.extra | counters)
    return Update(learner, {**metrics, **of_update, **numbers})


def _forms(params: Params) -> dict[str, str]:
    return {name: f"{value.dtype}{list(value.shape)}" for name, value in params.items()}


def counted(learner: LearnerState, rounds: Sequence[EpisodeBatch]) -> Params:
    """The counters after the episodes of some rounds."""
    made = sum(episodes.num_steps for episodes in rounds)
    nominal = sum(int(episodes.real.sum()) * episodes.rewards.shape[2] for episodes in rounds)
    return {
        ENV_STEPS: np.array(int(learner.extra[ENV_STEPS]) + made, np.int64),
        ENV_STEPS_NOMINAL: np.array(int(learner.extra[ENV_STEPS_NOMINAL]) + nominal, np.int64),
    }

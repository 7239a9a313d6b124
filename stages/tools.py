"""Interfaces that `flows` implements and passes to stages besides their inputs."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, Self

from metaloom.pipeline.algorithms.contract import Learner
from metaloom.pipeline.dataflow.stage import At
from metaloom.pipeline.policies.config import ActorKind
from metaloom.pipeline.types import EpisodeBatch, LearnerState, TaskBatch, TaskParams, Update
from metaloom.stages.counters import require_params, require_state
from metaloom.stages.rollouts.faults import RolloutPosition

Tested = Callable[[int, EpisodeBatch], object]
"""Callback that receives the test episodes after each number of adaptation steps."""

WarmStart = Callable[[], LearnerState | None]
"""Function that returns the learner a run starts from, or None for a run without a warm start."""


class Rollouts(Protocol):
    """Collector of episodes, wherever the environments run."""

    def collect(self, params: TaskParams, tasks: TaskBatch, position: RolloutPosition) -> EpisodeBatch:
        """Collect complete episodes per task."""
        ...

    def sampling(
        self, episodes_per_task: int, *, deterministic: bool, actor: ActorKind | None = None, one_trial: bool = False
    ) -> Self:
        """Return a copy that collects `episodes_per_task` episodes, with the most likely actions if `deterministic`."""
        ...

    def filling(self, min_steps: int, *, actor: ActorKind) -> Self:
        """Return a copy that uses another actor and collects at least `min_steps` steps per task."""
        ...


class Adaptation(Protocol):
    """Adaptation of a learner to tasks through the stages of its graph, as in training."""

    def adapt(
        self, state: LearnerState, params: TaskParams, rounds: Sequence[EpisodeBatch], *, run_seed: int
    ) -> TaskParams:
        """Return each task's parameters after the adaptation step on the last rollout batch, collected with `params`.

        `rounds` are all rollout batches so far; step k follows batch k. Earlier ones may lack behavior, reward terms
        and facts.
        """
        ...


def acting_params(learner: Learner[Any, Any], acting: Update | TaskParams, at: At, num_tasks: int) -> TaskParams:
    """Return each task's parameters: the adapted ones if given, otherwise the learner's."""
    if isinstance(acting, TaskParams):
        return acting
    stored = acting.learner
    state = require_state(learner.at_start(stored, run_seed=at.run_seed), learner, "at_start of", stored.params)
    return require_params(learner.acting_params(state, num_tasks), num_tasks, learner, "acting_params of")

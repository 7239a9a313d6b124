"""Interfaces that `flows` implements and stages receive besides their inputs."""

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
"""Function that reads the learner a run starts from; None for a run without a warm start."""


class Rollouts(Protocol):
    """Collects episodes, wherever the environments run."""

    def collect(self, params: TaskParams, tasks: TaskBatch, position: RolloutPosition) -> EpisodeBatch:
        """Return complete episodes of every task."""
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
    """Adapts a learner to tasks by the stages of its graph, as training does."""

    def adapt(
        self, state: LearnerState, params: TaskParams, rounds: Sequence[EpisodeBatch], *, run_seed: int
    ) -> TaskParams:
        """Return the parameters of every task after the adaptation step on the last rollout batch.

        Args:
            state: Learner state.
            params: Parameters that collected the last rollout batch.
            rounds: All rollout batches so far, the last one collected by `params`; step k follows batch k. Earlier
                ones may lack behavior, reward terms and facts.
            run_seed: Seed of the random draws.
        """
        ...


def acting_params(learner: Learner[Any, Any], acting: Update | TaskParams, at: At, num_tasks: int) -> TaskParams:
    """Return every task's parameters: adapted ones if there are any, otherwise the learner's.

    Raises:
        StageFault: the learner returned something else.
    """
    if isinstance(acting, TaskParams):
        return acting
    stored = acting.learner
    state = require_state(learner.at_start(stored, run_seed=at.run_seed), learner, "at_start of", stored.params)
    return require_params(learner.acting_params(state, num_tasks), num_tasks, learner, "acting_params of")

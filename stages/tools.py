"""Tools that stages receive in addition to their inputs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

from metaloom.pipeline.algorithms.contract import AnyLearner
from metaloom.pipeline.config.run import RunConfig
from metaloom.pipeline.dataflow.graph import Graph
from metaloom.pipeline.dataflow.refs import StageRef
from metaloom.pipeline.dataflow.stage import TOOLS, At, GraphError, call
from metaloom.pipeline.policies.config import ActorKind
from metaloom.pipeline.types import EpisodeBatch, LearnerState, TaskBatch, TaskParams, Update
from metaloom.stages.counters import require_params, require_state
from metaloom.stages.rollouts.faults import RolloutPosition

Tested = Callable[[int, EpisodeBatch], object]
"""Callback that receives the number of adaptation steps so far and the test episodes that follow them."""

WarmStart = Callable[[], LearnerState | None]
"""Function that returns the learner state from which a run starts, or None without a warm start."""


class Rollouts(Protocol):
    """Collector of episodes, wherever the environments run."""

    def collect(self, params: TaskParams, tasks: TaskBatch, position: RolloutPosition) -> EpisodeBatch:
        """Collect complete episodes for each task, using its parameters."""
        ...

    def sampling(
        self, episodes_per_task: int, *, deterministic: bool, actor: ActorKind | None = None, one_trial: bool = False
    ) -> Self:
        """Return a copy that collects this many episodes per task, taking the most likely actions if `deterministic`.

        `actor` overrides the algorithm's actor. With `one_trial`, episodes run in sequence and share actor memory.
        """
        ...

    def filling(self, min_steps: int, *, actor: ActorKind) -> Self:
        """Return a copy that uses another actor and collects at least `min_steps` steps per task."""
        ...


@dataclass(frozen=True)
class Adaptation:
    """Adaptation of a learner to tasks through the stages of its graph, as in training; `tools` are keyed by name."""

    graph: Graph
    config: RunConfig
    tools: Mapping[str, Any]

    def adapt(
        self, state: LearnerState, params: TaskParams, rounds: Sequence[EpisodeBatch], *, run_seed: int
    ) -> TaskParams:
        """Return each task's parameters after the adaptation step on the last rollout batch, collected with `params`.

        `rounds` are all rollout batches so far; step k follows batch k. Earlier ones may lack behavior, reward terms
        and facts.
        """
        if self.graph.adaptation is None:
            return params
        collecting, adapted = self.graph.adaptation
        k = len(rounds) - 1
        at = At(run_seed, 0, k, training=False)
        outputs: dict[StageRef | None, Any] = {None: params, self.graph.learner_ref(0): Update(state, {})}
        outputs |= {collecting.at(0, n): episodes for n, episodes in enumerate(rounds)}
        for stage in self.graph.adapting:
            inputs = self.graph.inputs_of_adaptation(self.config, stage, k)
            given = {
                name: tuple(outputs[ref] for ref in wanted) if isinstance(wanted, tuple) else outputs[wanted]
                for name, wanted in inputs.items()
            }
            tools = {**self.tools, "at": at}
            if missing := [name for name in stage.tools if name not in tools]:
                raise GraphError(
                    f"graph {self.graph.name}: {stage.name} takes {missing[0]} ({TOOLS.get(missing[0], 'shared')}), "
                    f"which is not available when a learner adapts after training; use only {', '.join(tools)}"
                )
            outputs[stage.at(0, k)] = call(stage, tools, given, self.tools["parallel"])
        # Parameters that a stage does not return stay the same. PEARL's stages return only the posterior.
        return TaskParams({**params.params, **outputs[adapted.at(0, k)].params})


def acting_params(learner: AnyLearner, acting: Update | TaskParams, at: At, num_tasks: int) -> TaskParams:
    """Return each task's parameters: the adapted ones if given, otherwise the learner's."""
    if isinstance(acting, TaskParams):
        return acting
    stored = acting.learner
    state = require_state(learner.at_start(stored, run_seed=at.run_seed), learner, "at_start", stored.params)
    return require_params(learner.acting_params(state, num_tasks), num_tasks, learner, "acting_params")

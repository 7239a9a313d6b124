"""Adaptation after training, by a graph's adaptation stages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from metaloom.pipeline.config.run import RunConfig
from metaloom.pipeline.dataflow.graph import Graph
from metaloom.pipeline.dataflow.refs import StageRef
from metaloom.pipeline.dataflow.stage import TOOLS, At, GraphError, call
from metaloom.pipeline.types import EpisodeBatch, LearnerState, TaskParams, Update


@dataclass(frozen=True)
class GraphAdaptation:
    """Adapts a learner as in training; see `metaloom.stages.tools.Adaptation`."""

    graph: Graph
    config: RunConfig
    tools: Mapping[str, Any]

    def adapt(
        self, state: LearnerState, params: TaskParams, rounds: Sequence[EpisodeBatch], *, run_seed: int
    ) -> TaskParams:
        """Return the per-task parameters after the adaptation step on the last rollout batch."""
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

"""Computing the stages of a run, and the tools that the stages share.

Training, resuming and replaying all call `Runner.compute`; they differ only in where inputs come from and how the
output is used.
"""

import logging
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Self

from metaloom.flows.graph.tables import GRAPHS, graph_of
from metaloom.flows.graph.warm_start import read_learner
from metaloom.flows.rollouts.workers import RolloutWorkers
from metaloom.pipeline.algorithms.contract import AnyLearner, Setup
from metaloom.pipeline.building import build_learner, measures_of, setup_of
from metaloom.pipeline.config.run import RunConfig
from metaloom.pipeline.config.sources import own_paths, plugin_paths
from metaloom.pipeline.dataflow.graph import WITNESS, Graph
from metaloom.pipeline.dataflow.outputs import Outputs, SpanOutputs, read_only
from metaloom.pipeline.dataflow.refs import Span, StageRef
from metaloom.pipeline.dataflow.stage import At, GraphError, Input, Stage, call, tools_of
from metaloom.pipeline.envs import REPRODUCED
from metaloom.pipeline.envs.contract import MetaEnv
from metaloom.pipeline.estimation.diagnostics import Measures
from metaloom.pipeline.global_random import GlobalRandomWatch
from metaloom.pipeline.numerics import normal_numerics
from metaloom.pipeline.policies.acting import check_actor_params
from metaloom.pipeline.schema import ConfigError
from metaloom.pipeline.tasks.evaluation import evaluation_tasks
from metaloom.pipeline.tasks.samplers import require_classes
from metaloom.pipeline.types import BatchError, Evaluation, LearnerState, ParallelMap, Samples, Update
from metaloom.stages.counters import require_state
from metaloom.stages.evaluate import EVALUATE, unseen
from metaloom.stages.faults import StageFault
from metaloom.stages.rollouts.faults import RolloutPosition
from metaloom.stages.tools import Adaptation, Tested, acting_params
from metaloom.stages.witness import play_again
from metaloom.storage.format.codec import Value

log: logging.Logger = logging.getLogger(__name__)

_ADAPTING = ("config", "setup", "learner", "env", "rollouts", "parallel")


@dataclass(frozen=True)
class Runner:
    """The stages of a run, each of which can be computed once its inputs are available, and the tools that they share.

    `metaloom.pipeline.dataflow.stage.TOOLS` describes the tools.
    """

    graph: Graph
    config: RunConfig
    setup: Setup
    learner: AnyLearner
    env: MetaEnv
    rollouts: RolloutWorkers
    parallel: ParallelMap
    measures: Measures
    watches: Mapping[bool, GlobalRandomWatch]  # keyed by `Stage.samples`; empty for runs without plug-ins
    _shared: dict[str, object] = field(default_factory=dict[str, object], repr=False)
    _differed: list[StageRef] = field(default_factory=list[StageRef], repr=False)

    @classmethod
    def build(cls, config: RunConfig, rollouts: RolloutWorkers, parallel: ParallelMap) -> Self:
        """Return the stages of a run; raise ConfigError or EnvError if settings and environment are incompatible."""
        setup, learner, env = build_learner(config)
        graph, measures = graph_of(config), measures_of(config, env)
        graph.check(config, env)
        if measures.of_steps and not any(stage.output is Samples for stage in graph.stages):
            raise ConfigError(
                f"metrics: {', '.join(measures.of_steps)} take a Step, but "
                f"{config.algorithm.name} has no samples; use functions that take an EpisodeBatch"
            )
        if config.task_sampling == "balanced":
            require_classes(env, "task_sampling")
        if config.evaluation.every is not None and all(stage.output is not Evaluation for stage in graph.stages):
            raise ConfigError(
                f"evaluation.every is {config.evaluation.every}, but the graph {config.algorithm.graph} "
                "has no stage that evaluates; unset it, or add metaloom.stages.evaluate.EVALUATE to the graph"
            )
        if config.evaluation.every is not None or not isinstance(config.evaluation.tasks, str):
            # Check the tasks of the last evaluation before the first iteration.
            evaluation_tasks(config, env, config.iterations)
        watched = (False, True) if own_paths(plugin_paths(config)) else ()
        watches = {samples: GlobalRandomWatch() for samples in watched}
        return cls(graph, config, setup, learner, env, rollouts, parallel, measures, watches)

    @cached_property
    def own(self) -> list[str]:
        """Import paths of the run's plug-ins that come with neither Metaloom nor gymnasium."""
        return own_paths(plugin_paths(self.config))

    def under(self, config: RunConfig) -> Self:
        """Return the runner with other settings for the same environment."""
        setup = setup_of(config, self.env)
        learner, measures = config.algorithm.build(setup), measures_of(config, self.env)
        return replace(self, config=config, setup=setup, learner=learner, measures=measures, _shared={})

    def try_learner(self) -> None:
        """Check that a learner can be initialized, since optimizers reject options only once they have parameters.

        Raises ConfigError if an option is rejected, if a network's outputs are not float32, or if the policy cannot
        act with the initial parameters, and StageFault if the learner's initial state is invalid.
        """
        # Imported here: reading runs does not need torch.
        from metaloom.pipeline.nn.modules import float32_alone

        config = self.config
        with normal_numerics(config.device), float32_alone():
            learner = config.algorithm.build(self.setup)
            state = require_state(learner.initialize(run_seed=config.seed), learner, "initialize", like={})
            params = acting_params(learner, Update(state, {}), At(config.seed, 0), 1).params
            try:
                check_actor_params(config.algorithm.actor, config.policy, params, self.setup)
            except BatchError as problem:
                raise ConfigError(
                    f"algorithm {config.algorithm.name}: the policy cannot act with its learner's initial parameters: "
                    f"{problem}"
                ) from problem

    def with_new_learner(self) -> Self:
        """Return the runner with a new learner, as in a new process.

        Shared objects of custom graphs are also rebuilt. Built-in ones are kept, since they only cache stored outputs.
        """
        ours = {make for graph in GRAPHS.values() for make in graph.shared.values()}
        shared = {name: value for name, value in self._shared.items() if self.graph.shared[name] in ours}
        return replace(self, learner=self.config.algorithm.build(self.setup), _shared=shared)

    def tool(self, name: str) -> Any:
        """Return the tool with this name; a shared object is built on first use."""
        if name in self.graph.shared:
            if name not in self._shared:
                make = self.graph.shared[name]
                self._shared[name] = make(*map(self.tool, tools_of(make)))
            return self._shared[name]
        if name == "warm_start":
            start = self.config.init_from
            return (lambda: None) if start is None else partial(read_learner, start)
        if name == "adaptation":
            return Adaptation(self.graph, self.config, {name: getattr(self, name) for name in _ADAPTING})
        return unseen if name == "tested" else getattr(self, name)

    def order(self, iteration: int) -> list[StageRef]:
        """Return the stages of an iteration in the order in which they run."""
        return self.graph.order(self.config, iteration)

    def inputs(self, ref: StageRef) -> list[StageRef | Span]:
        """Return references to a stage's inputs, as its record lists them."""
        declared, found = self.graph.inputs(self.config, ref), list[StageRef | Span]()
        for name, wanted in declared.items():
            given = wanted if isinstance(wanted, tuple) else (wanted,)
            # A learner passed as two inputs is listed once; a witness's inputs are always listed.
            found += [one for one in given if name in WITNESS or one not in found]
        return found

    def upstream(self, ref: StageRef) -> list[StageRef]:
        """Return references to the outputs that a stage reads; for a span, only those of its last iteration."""
        found: list[StageRef] = []
        for wanted in self.inputs(ref):
            found += self.graph.within(self.config, wanted, wanted.last) if isinstance(wanted, Span) else [wanted]
        return list(dict.fromkeys(found))

    def seed_position(self, ref: StageRef) -> tuple[int, ...]:
        """Return the position in the run's random streams from which a stage draws."""
        return self.graph[ref.stage].seed_position(self.config, ref.iteration, ref.step)

    def load_inputs(self, ref: StageRef, outputs: Outputs, *, witness: bool = True) -> dict[str, Any]:
        """Load a stage's inputs, keyed by argument name, with or without the witness's inputs."""
        loaded: dict[StageRef, Any] = {}
        inputs = self.graph.inputs(self.config, ref).items()
        return {name: self._bring(wanted, outputs, loaded) for name, wanted in inputs if witness or name not in WITNESS}

    def compute(self, ref: StageRef, outputs: Outputs) -> Value:
        """Compute a stage's output from stored outputs."""
        inputs = self.load_inputs(ref, outputs)
        return self.witnessed(ref, self.run(ref, inputs), inputs)

    def run(self, ref: StageRef, inputs: Mapping[str, Any]) -> Value:
        """Compute a stage's output from its inputs, keyed by name, ignoring the witness's inputs."""
        declared = {name: value for name, value in inputs.items() if name not in WITNESS}
        return self._compute(self.graph[ref.stage], At(self.config.seed, ref.iteration, ref.step), declared, ref.where)

    def witnessed(self, ref: StageRef, value: Value, inputs: Mapping[str, Any]) -> Value:
        """Return an update with the witness's result added to its metrics; return other outputs unchanged."""
        if WITNESS[0] not in inputs:
            return value
        batch = self.graph.inputs(self.config, ref)[WITNESS[1]]
        assert isinstance(batch, StageRef)
        assert isinstance(value, Update)
        position = RolloutPosition(self.config.seed, ref.iteration, batch.step)
        collect = self.rollouts.repeating().collect
        difference = play_again(inputs[WITNESS[0]], inputs[WITNESS[1]], position, collect)
        if difference is not None and self._differed in ([], [ref]):
            self._differed[:] = [ref]
            log.warning(
                "%s: an episode differed when it was replayed on a new copy: %s, so replay and resume give different "
                "results. Set all state in `reset`, or fork with --set env.copies=fresh if copies keep state",
                self.config.env.name,
                difference,
            )
        return replace(value, metrics={**value.metrics, REPRODUCED: float(difference is None)})

    def evaluate(self, learner: LearnerState, updates: int, tested: Tested = unseen) -> Evaluation:
        """Return the evaluation of a learner after `updates` updates, with the configured evaluation settings."""
        stage = next((stage for stage in self.graph.stages if stage.output is Evaluation), EVALUATE)
        at, where = At(self.config.seed, updates - 1), f"evaluation after {updates} updates"
        required = [name for name, optional in stage.inputs.items() if not optional]
        if len(required) != 1:
            raise GraphError(
                f"graph {self.graph.name}: {stage.name} reads {', '.join(required) or 'nothing'}, but after training "
                "only the learner is available; it must have exactly one input without a default"
            )
        found: object = self._compute(stage, at, {required[0]: Update(learner, {})}, where, tested=tested)
        if not isinstance(found, Evaluation):
            raise StageFault(f"{where}: the stage {stage.name} returned {type(found).__name__}; expected Evaluation")
        return found

    def _compute(self, stage: Stage, at: At, inputs: Mapping[str, Any], where: str, **tools: Any) -> Any:
        """Call a stage's function with normalized numerics; refuse a plug-in's draw from a global random generator."""
        with normal_numerics(self.config.device):
            watch = self.watches.get(stage.samples)
            if watch is None:
                return self._call(stage, at, inputs, tools)
            found, draw = watch.draw_of(
                partial(self._call, stage, at, inputs, tools),
                stage.name,
                partial(replace(self, parallel=map)._call, stage, at, inputs, tools),
            )
        if draw is not None and draw.in_env:  # sampling stages check their own draws and allow some
            watch.stop()
        elif draw is not None:
            raise StageFault(f"{where}: {draw}")
        return found

    def _call(self, stage: Stage, at: At, inputs: Mapping[str, Any], tools: Mapping[str, Any]) -> Any:
        given = {"at": at, **tools}
        given |= {name: self.tool(name) for name in stage.tools if name not in given}
        return call(stage, given, inputs, self.parallel)

    def _bring(self, wanted: Input, outputs: Outputs, loaded: dict[StageRef, Any]) -> Any:
        if isinstance(wanted, Span):
            return SpanOutputs(wanted, self.graph, self.config, outputs)
        refs = wanted if isinstance(wanted, tuple) else (wanted,)
        for ref in refs:
            if ref not in loaded:
                value = outputs.load(ref)  # perhaps not stored yet, and a tensor can share its memory
                loaded[ref] = read_only(self.graph[ref.stage].as_declared(deepcopy(value) if self.own else value))
        return tuple(loaded[ref] for ref in refs) if isinstance(wanted, tuple) else loaded[wanted]

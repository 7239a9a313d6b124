"""Objects shared by the stages of a run, constant over iterations."""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

from metaloom.flows.graph.adaptation import GraphAdaptation
from metaloom.flows.graph.tables import GRAPHS, graph_of
from metaloom.flows.graph.warm_start import read_learner
from metaloom.flows.rollouts.workers import RolloutWorkers
from metaloom.pipeline.algorithms.contract import Learner, Setup
from metaloom.pipeline.building import build_learner, measures_of, setup_of
from metaloom.pipeline.config.run import RunConfig
from metaloom.pipeline.dataflow.graph import Graph
from metaloom.pipeline.dataflow.stage import At, tools_of
from metaloom.pipeline.envs.contract import MetaEnv
from metaloom.pipeline.estimation.diagnostics import Measures
from metaloom.pipeline.numerics import normal_numerics
from metaloom.pipeline.policies.acting import check_actor_params
from metaloom.pipeline.schema import ConfigError
from metaloom.pipeline.types import BatchError, ParallelMap, Update
from metaloom.stages.counters import require_state
from metaloom.stages.evaluate import unseen
from metaloom.stages.tools import acting_params

_ADAPTING = ("config", "setup", "learner", "env", "rollouts", "parallel")


@dataclass(frozen=True)
class Context:
    """Tools of a run's stages, by name, as `metaloom.pipeline.dataflow.stage.TOOLS` describes them."""

    graph: Graph
    config: RunConfig
    setup: Setup
    learner: Learner[Any, Any]
    env: MetaEnv
    rollouts: RolloutWorkers
    parallel: ParallelMap
    measures: Measures
    _shared: dict[str, object] = field(default_factory=dict[str, object], repr=False)

    @classmethod
    def build(cls, config: RunConfig, rollouts: RolloutWorkers, parallel: ParallelMap) -> Self:
        """Build the shared objects for the stages of a run with this configuration.

        Raises:
            ConfigError: the algorithm or an option does not support the environment.
        """
        setup, learner, env = build_learner(config)
        return cls(graph_of(config), config, setup, learner, env, rollouts, parallel, measures_of(config, env))

    def under(self, config: RunConfig) -> Self:
        """Return the context with other settings. The environment must stay the same."""
        setup = setup_of(config, self.env)
        learner, measures = config.algorithm.build(setup), measures_of(config, self.env)
        return replace(self, config=config, setup=setup, learner=learner, measures=measures, _shared={})

    def try_learner(self) -> None:
        """Initialize a learner as a check: optimizers reject options only when they have parameters.

        Raises:
            ConfigError: an option is rejected, a network's outputs are not float32, or the policy cannot act with the
                parameters.
            StageFault: the learner returns no valid state.
        """
        # Imported here: reading runs does not need torch.
        from metaloom.pipeline.nn.modules import float32_alone

        config = self.config
        with normal_numerics(config.device), float32_alone():
            learner = config.algorithm.build(self.setup)
            state = require_state(learner.initialize(run_seed=config.seed), learner, "initialize of", like={})
            params = acting_params(learner, Update(state, {}), At(config.seed, 0), 1).params
            try:
                check_actor_params(config.algorithm.actor, config.policy, params, self.setup)
            except BatchError as problem:
                raise ConfigError(
                    f"algorithm {config.algorithm.name}: the policy cannot act with its learner's initial parameters: "
                    f"{problem}"
                ) from problem

    def with_new_learner(self) -> Self:
        """Return the context with a new learner, as in a new process.

        Shared objects of custom graphs are also rebuilt. Built-in ones are kept, since they only cache stored outputs.
        """
        ours = {make for graph in GRAPHS.values() for make in graph.shared.values()}
        shared = {name: value for name, value in self._shared.items() if self.graph.shared[name] in ours}
        return replace(self, learner=self.config.algorithm.build(self.setup), _shared=shared)

    def tool(self, name: str) -> Any:
        """Return a tool by name."""
        if name in self.graph.shared:
            if name not in self._shared:
                make = self.graph.shared[name]
                self._shared[name] = make(*map(self.tool, tools_of(make)))
            return self._shared[name]
        if name == "warm_start":
            start = self.config.init_from
            return (lambda: None) if start is None else partial(read_learner, start)
        if name == "adaptation":
            return GraphAdaptation(self.graph, self.config, {name: getattr(self, name) for name in _ADAPTING})
        return unseen if name == "tested" else getattr(self, name)

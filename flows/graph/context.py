"""Shared context of a run's stages: one small object for everything that is constant over iterations."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeVar, cast

from metaloom.flows.rollouts.workers import RolloutWorkers
from metaloom.pipeline.algorithms.contract import Learner, Setup
from metaloom.pipeline.building import build_learner, measures_of, setup_of
from metaloom.pipeline.config.run import RunConfig
from metaloom.pipeline.envs.contract import MetaEnv
from metaloom.pipeline.estimation.diagnostics import Measures
from metaloom.pipeline.numerics import normal_numerics
from metaloom.pipeline.types import LearnerState, ParallelMap, Update

T = TypeVar("T")


@dataclass(frozen=True)
class Context:
    """Objects that the stages of one run share.

    Attributes:
        config: Settings of the run.
        setup: Problem dimensions that the learner was built for.
        learner: Algorithm, built for the run.
        env: One environment of the run, for its spaces and tasks.
        rollouts: Collector of episodes.
        parallel: Maps over chunks of tasks; no result depends on it.
        measures: Additional measurements of every rollout batch.
    """

    config: RunConfig
    setup: Setup
    learner: Learner[Any, Any]
    env: MetaEnv
    rollouts: RolloutWorkers
    parallel: ParallelMap
    measures: Measures
    _kept: dict[str, object] = field(default_factory=dict[str, object], repr=False)

    @classmethod
    def build(cls, config: RunConfig, rollouts: RolloutWorkers, parallel: ParallelMap) -> Self:
        """Build the shared objects for the stages of a run with this configuration.

        Raises:
            ConfigError: the algorithm or an option is not for such an environment.
        """
        setup, learner, env = build_learner(config)
        parallel = rollouts.mathematics(config, learner, parallel)
        return cls(config, setup, learner, env, rollouts, parallel, measures_of(config, env))

    def under(self, config: RunConfig) -> Self:
        """Return the context with other settings. The environment must stay the same."""
        setup = setup_of(config, self.env)
        learner, measures = config.algorithm.build(setup), measures_of(config, self.env)
        parallel = self.rollouts.mathematics(config, learner, self.parallel)
        return replace(
            self, config=config, setup=setup, learner=learner, parallel=parallel, measures=measures, _kept={}
        )

    def try_learner(self) -> None:
        """Initialize a learner that is not kept: only with parameters does an optimizer say what it refuses.

        Raises:
            ConfigError: it refuses an option.
        """
        with normal_numerics(self.config.device):
            self.learner.initialize(run_seed=self.config.seed)

    def with_new_learner(self) -> Self:
        """Return the context with a learner that has computed nothing yet, as in a fresh process."""
        learner = self.config.algorithm.build(self.setup)
        parallel = self.rollouts.mathematics(self.config, learner, self.parallel)
        return replace(self, learner=learner, parallel=parallel)

    def start(self, update: Update) -> LearnerState:
        """Return the state with which the iteration after an update acts and learns."""
        return self.learner.at_start(update.learner, run_seed=self.config.seed)

    def keep(self, name: str, build: Callable[[], T]) -> T:
        """Return a value that stages cache between iterations; it never affects a bit."""
        if name not in self._kept:
            self._kept[name] = build()
        return cast(T, self._kept[name])

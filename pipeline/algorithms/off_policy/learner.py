"""The contract of learners with a replay buffer: gradient steps from minibatches, by a kernel or in torch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar, Generic, TypeVar

import numpy as np

from metaloom.pipeline.algorithms.contract import Learner, Setup
from metaloom.pipeline.algorithms.off_policy.gradient_steps import GradientSteps, means, require_finite
from metaloom.pipeline.nn.optimization import OptimizerConfig
from metaloom.pipeline.nn.vector_optimizers import is_customary
from metaloom.pipeline.schema import ConfigError
from metaloom.pipeline.seeding import generator
from metaloom.pipeline.types import Array, LearnerState, Metrics, Minibatch, ParallelMap, TaskParams

FUSED = "plain networks on the CPU, derivatives written down"
"""Why a fused kernel is chosen."""

Evidence = TypeVar("Evidence", contravariant=True)
Noise = TypeVar("Noise")


class OffPolicyLearner(Learner[Evidence, Iterable[Minibatch]], Generic[Evidence, Noise]):
    """Makes one gradient step per minibatch; see Learner.

    Attributes:
        metrics: names of what describes a gradient step.
    """

    metrics: ClassVar[tuple[str, ...]]
    lower: ClassVar[str] = "algorithm.learning_rate or algorithm.max_grad_norm"
    """Advice against parameters that are not finite."""

    @abstractmethod
    def gradient_steps(self, state: LearnerState, *, parallel: ParallelMap = map) -> GradientSteps[Noise]:
        """Return working copies of a state, by the kernel that was chosen or in torch.

        Args:
            state: is left as it is.
            parallel: maps over parts of a gradient step; the result does not depend on it.
        """

    @abstractmethod
    def noise(self, minibatch: Minibatch, rng: np.random.Generator) -> Noise:
        """Draw what a gradient step on this minibatch takes from chance."""

    @abstractmethod
    def networks_of(self, state: LearnerState) -> Mapping[str, Mapping[str, Array]]:
        """Return what has to be finite after an update, under the names of messages."""

    def filling_params(self, state: LearnerState, num_tasks: int) -> TaskParams:
        """Return what the algorithm's own actor fills the replay buffer with; by default what it acts with."""
        return self.acting_params(state, num_tasks)

    def described(self, state: LearnerState) -> Metrics:
        """Return metrics of the iteration that learns from this state, besides those of its gradient steps."""
        del state
        return {}

    def update(
        self,
        state: LearnerState,
        experience: Iterable[Minibatch],
        *,
        run_seed: int,
        iteration: int,
        parallel: ParallelMap = map,
    ) -> tuple[LearnerState, Metrics]:
        """Make one gradient step per minibatch; see Learner. Metrics are means over them."""
        rng = generator(run_seed, "updates", iteration)
        steps = self.gradient_steps(state, parallel=parallel)
        each = [steps.step(minibatch, self.noise(minibatch, rng)) for minibatch in experience]
        updated = steps.state()
        require_finite(self.networks_of(updated), self.lower)
        return updated, means(self.metrics, each) | self.described(state)


def require_actions(name: str, setup: Setup, *, discrete: bool) -> None:
    """Refuse an environment whose actions are of the other kind.

    Raises:
        ConfigError: naming the algorithms for such actions.
    """
    if bool(setup.num_actions) == discrete:
        return
    found = f"{setup.num_actions} discrete ones" if setup.num_actions else "continuous"
    kind, others = ("discrete", "sac or pearl") if discrete else ("continuous", "dql")
    raise ConfigError(
        f"algorithm.name is {name}, which is for {kind} actions, but those of {setup.env_name} are {found}; required "
        f"{others}, or a2c, ppo, ppo2 or svpg"
    )


def optimizer_blockers(optimizer: OptimizerConfig) -> Iterator[str]:
    """Tell what fused kernels do not know about an optimizer."""
    if not is_customary(optimizer):
        yield f"optimizer is {optimizer.name}" + (f" with {optimizer.options}" if optimizer.options else "")

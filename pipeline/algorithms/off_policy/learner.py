"""The contract of learners with a replay buffer: gradient steps from minibatches, by a kernel or in torch.

A kernel and its definition in torch both update working copies of a state, and count the gradient steps.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Generic, Protocol, SupportsFloat, TypeVar

import numpy as np

from metaloom.pipeline.algorithms.contract import NUM_UPDATES, Kernel, KernelChoice, Learner, Setup
from metaloom.pipeline.algorithms.finite_checks import require_finite_params
from metaloom.pipeline.algorithms.kernel_choice import choose_kernel, network_blockers, optimizer_blockers
from metaloom.pipeline.nn.device import use_device
from metaloom.pipeline.nn.networks import Network
from metaloom.pipeline.nn.optimization import OptimizerConfig
from metaloom.pipeline.schema import ConfigError
from metaloom.pipeline.seeding import generator
from metaloom.pipeline.types import (
    Array,
    LearnerState,
    Metrics,
    Minibatch,
    ParallelMap,
    Params,
    TaskParams,
    Transitions,
)

NUM_GRADIENT_STEPS = "num_gradient_steps"
"""Name in the state of the number of gradient steps over the run."""

Evidence = TypeVar("Evidence", contravariant=True)
Noise = TypeVar("Noise", contravariant=True)
"""Random arrays of a gradient step; a kernel and its definition receive the same ones."""
DrawnNoise = TypeVar("DrawnNoise")


class GradientSteps(Protocol[Noise]):
    """Working copies of all arrays of a state, which gradient steps change in place."""

    def step(self, minibatch: Minibatch, noise: Noise) -> Mapping[str, SupportsFloat]:
        """Make one gradient step and return its metrics."""
        ...

    def state(self) -> LearnerState:
        """Return the state after the iteration: the current arrays, with the number of updates raised by one."""
        ...


@dataclass
class Counters:
    """Iterations and gradient steps that a state has learned from."""

    updates: int
    gradient_steps: int

    @classmethod
    def of(cls, state: LearnerState) -> Counters:
        """Return the counters of a state."""
        return cls(int(state.extra[NUM_UPDATES]), int(state.extra[NUM_GRADIENT_STEPS]))

    def arrays(self) -> Params:
        """Return the counters as arrays of a state."""
        updates, steps = np.array([self.updates, self.gradient_steps], np.int64)
        return {NUM_UPDATES: np.array(updates), NUM_GRADIENT_STEPS: np.array(steps)}


def merged(minibatch: Minibatch) -> Transitions:
    """Return the transitions [K, N] of all tasks as one batch [K * N]."""
    columns = vars(minibatch.transitions).items()
    return Transitions(**{name: values.reshape(-1, *values.shape[2:]) for name, values in columns})


class OffPolicyLearner(Learner[Evidence, Iterable[Minibatch]], Generic[Evidence, DrawnNoise]):
    """Makes one gradient step per minibatch; see Learner."""

    metrics: ClassVar[tuple[str, ...]]
    lower: ClassVar[str] = "algorithm.learning_rate or algorithm.max_grad_norm"
    """Advice against parameters that are not finite."""

    def __init__(self, name: str, setup: Setup, *, discrete: bool) -> None:
        """Prepare the device.

        Raises:
            ConfigError: the device is missing, or the environment's actions are of the other kind.
        """
        if bool(setup.num_actions) != discrete:
            found = f"{setup.num_actions} discrete ones" if setup.num_actions else "continuous ones"
            kind, others = ("discrete", "sac or pearl") if discrete else ("continuous", "dql")
            raise ConfigError(
                f"algorithm.name is {name}, which is for {kind} actions, but {setup.env_name} has {found}; "
                f"required {others}, or a2c, ppo, ppo2 or svpg"
            )
        self._setup, self._device = setup, use_device(setup.device)

    def choose_kernel(
        self, asked: KernelChoice, optimizer: OptimizerConfig, *networks: Network, others: Iterable[str] = ()
    ) -> Kernel:
        """Choose the fused kernel for plain networks on the CPU, unless the setting or a blocker forbids it.

        Raises:
            ConfigError: the fused kernel was requested and does not fit.
        """
        specs = [network.spec for network in networks]
        blockers = [*network_blockers(*specs, device=self._setup.device), *optimizer_blockers(optimizer), *others]
        return choose_kernel(asked, blockers=blockers, fused="plain networks on the CPU, derivatives written down")

    @abstractmethod
    def gradient_steps(self, state: LearnerState, *, parallel: ParallelMap = map) -> GradientSteps[DrawnNoise]:
        """Return working copies of a state, by the kernel that was chosen or in torch."""

    def shown(self, minibatch: Minibatch) -> Minibatch:
        """Return a minibatch as gradient steps receive it; unchanged by default."""
        return minibatch

    @abstractmethod
    def noise(self, minibatch: Minibatch, rng: np.random.Generator) -> DrawnNoise:
        """Draw the noise of a gradient step on this minibatch."""

    @abstractmethod
    def networks_of(self, state: LearnerState) -> Mapping[str, Mapping[str, Array]]:
        """Return the arrays that must be finite after an update, by their names in messages."""

    def filling_params(self, state: LearnerState, num_tasks: int) -> TaskParams:
        """Return the parameters with which the algorithm's actor fills the buffer; by default the acting ones."""
        return self.acting_params(state, num_tasks)

    def described(self, state: LearnerState) -> Metrics:
        """Return metrics of the iteration that learns from this state, besides its gradient steps' metrics."""
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
        """Make one gradient step per minibatch; see Learner. Metrics are means over the steps; NaN without steps."""
        rng = generator(run_seed, "updates", iteration)
        steps = self.gradient_steps(state, parallel=parallel)
        each = [steps.step(minibatch, self.noise(minibatch, rng)) for minibatch in map(self.shown, experience)]
        updated = steps.state()
        require_finite_params(self.networks_of(updated), stage="update", advice=f"Lower {self.lower}")
        # Metrics are read at the end, so that nothing waits for the device between steps.
        table = [[float(one[name]) for name in self.metrics] for one in each]
        averages = np.mean(table, axis=0) if table else np.full(len(self.metrics), np.nan)
        metrics = dict(zip(self.metrics, averages.tolist(), strict=True))
        return updated, metrics | {"gradient_steps": float(len(table))} | self.described(state)

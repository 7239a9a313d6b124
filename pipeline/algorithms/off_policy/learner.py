"""Base classes for learners with a replay buffer, and for their gradient steps in torch and in fused kernels."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Generic, Literal, NamedTuple, SupportsFloat, TypeVar

import numpy as np
import torch

from metaloom.pipeline.algorithms.contract import NUM_UPDATES, Kernel, Learner, Setup, require_finite_params
from metaloom.pipeline.algorithms.kernel_choice import choose_kernel, fused, network_blockers, optimizer_blockers
from metaloom.pipeline.nn.device import use_device
from metaloom.pipeline.nn.flat_networks import FlatParams, renamed
from metaloom.pipeline.nn.flat_tensors import FlatTensors
from metaloom.pipeline.nn.networks import Network
from metaloom.pipeline.nn.torch_optimizers import initial_state, lr_factor
from metaloom.pipeline.schema import ConfigError
from metaloom.pipeline.seeding import generator
from metaloom.pipeline.types import LearnerState, Metrics, Minibatch, ParallelMap, Params, TaskParams, Transitions

NUM_GRADIENT_STEPS = "num_gradient_steps"  # key in LearnerState.extra for the number of gradient steps so far

Evidence = TypeVar("Evidence", contravariant=True)
Noise = TypeVar("Noise", contravariant=True)
"""Random arrays for a gradient step; a kernel and its definition receive the same arrays."""
DrawnNoise = TypeVar("DrawnNoise")
Copy = TypeVar("Copy", FlatParams, FlatTensors)
Batches = Iterable[Minibatch]  # minibatches of an iteration's gradient steps, in order


class Stored(NamedTuple):
    """Location of a part's arrays in a learner's state: a field and name prefixes."""

    where: Literal["params", "extra"]
    there: str  # name prefix in that field
    here: str  # name prefix in a working copy, as used by the part's network
    optimizer: str | None = None  # name prefix of the optimizer's state; None for target networks

    def of(self, state: LearnerState) -> Params:
        """Return the part's arrays in a state, without copying them."""
        return renamed(getattr(state, self.where), self.there, self.here)


Layout = Mapping[str, Stored]  # locations of a learner's parts in its state, keyed by part name


def state_of(
    layout: Layout, parts: Mapping[str, Params], optimizers: Mapping[str, Params], counters: Mapping[str, int]
) -> LearnerState:
    """Build a state from the arrays of all parts, their optimizer states and the counters."""
    kept: dict[str, Params] = {"params": {}, "optimizer": {}, "extra": {}}
    for name, stored in layout.items():
        kept[stored.where] |= renamed(parts[name], stored.here, stored.there)
        if stored.optimizer is not None:
            kept["optimizer"] |= renamed(optimizers[name], "", stored.optimizer)
    kept["extra"] |= {name: np.array(count, np.int64) for name, count in counters.items()}
    return LearnerState(**kept)


class GradientSteps(ABC, Generic[Noise, Copy]):
    """Working copies of a state's arrays, which gradient steps change in place."""

    layout: ClassVar[Layout]
    epsilon: ClassVar[float | None] = None  # ε of adam and rmsprop; None for the default

    def __init__(
        self,
        settings: Any,
        networks: Any,
        state: LearnerState,
        *,
        discount: float,
        rates: Mapping[str, float],
        device: torch.device,
        parallel: ParallelMap = map,
    ) -> None:
        self._settings, self._networks, self._discount, self._rates = settings, networks, discount, rates
        self._device, self._parallel = device, parallel
        self.copies: dict[str, Copy] = {name: self.copied(name, state) for name in self.layout}
        for name, stored in self.layout.items():
            if stored.optimizer is not None:
                kept = renamed(state.optimizer, stored.optimizer, "")
                self.copies[name].optimize(settings.optimizer, kept, epsilon=self.epsilon)
        counted = (NUM_UPDATES, NUM_GRADIENT_STEPS)
        self._counters = {name: int(state.extra[name]) for name in counted if name in state.extra}
        self.prepare()

    @abstractmethod
    def copied(self, name: str, state: LearnerState) -> Copy:
        """Return a working copy of the named part of a state."""

    def prepare(self) -> None:
        """Prepare for the first step; by default, do nothing."""

    @abstractmethod
    def step(self, minibatch: Minibatch, noise: Noise) -> Mapping[str, SupportsFloat]:
        """Take one gradient step and return its metrics."""

    def state(self) -> LearnerState:
        """Return the current arrays as a state, with the number of updates incremented."""
        parts = {name: flat.copies() for name, flat in self.copies.items()}
        trained = (name for name, stored in self.layout.items() if stored.optimizer is not None)
        optimizers = {name: self.copies[name].optimizer_state for name in trained}
        counters = self._counters | {NUM_UPDATES: self._counters[NUM_UPDATES] + 1}
        return state_of(self.layout, parts, optimizers, counters)

    def counts_to(self, interval: int) -> bool:
        """Count a gradient step; return True on every `interval`-th step of the run."""
        self._counters[NUM_GRADIENT_STEPS] += 1
        return self._counters[NUM_GRADIENT_STEPS] % interval == 0


class TorchGradientSteps(GradientSteps[Noise, FlatTensors]):
    """Gradient steps with autograd."""

    def copied(self, name: str, state: LearnerState) -> FlatTensors:
        stored = self.layout[name]
        return FlatTensors(stored.of(state), self._device, () if stored.optimizer is None else None)


class FusedGradientSteps(GradientSteps[Noise, FlatParams]):
    """Gradient steps with hand-written derivatives."""

    def copied(self, name: str, state: LearnerState) -> FlatParams:
        return FlatParams(self.layout[name].of(state))


def merged(minibatch: Minibatch) -> Transitions:
    """Return the transitions [K, N] of all tasks as one batch [K * N]."""
    columns = vars(minibatch.transitions).items()
    return Transitions(**{name: values.reshape(-1, *values.shape[2:]) for name, values in columns})


class OffPolicyLearner(Learner[Evidence, Batches], Generic[Evidence, DrawnNoise]):
    """Base class for learners that take one gradient step per minibatch of stored transitions."""

    definition: ClassVar[type[TorchGradientSteps[Any]]]  # class that takes gradient steps in torch
    metrics: ClassVar[tuple[str, ...]]
    counters: ClassVar[tuple[str, ...]] = (NUM_UPDATES, NUM_GRADIENT_STEPS)
    finite: ClassVar[Mapping[str, str]]  # parts that must be finite after an update, mapped to their names in messages
    lower: ClassVar[str] = "algorithm.learning_rate or algorithm.max_grad_norm"
    """Settings that the message about non-finite parameters advises lowering."""
    networks: Any

    def __init__(self, settings: Any, setup: Setup, *, discrete: bool) -> None:
        if bool(setup.num_actions) != discrete:
            found = f"{setup.num_actions} discrete ones" if setup.num_actions else "continuous ones"
            kind, others = ("discrete", "sac or pearl") if discrete else ("continuous", "dql")
            raise ConfigError(
                f"algorithm.name is {settings.name}, which is for {kind} actions, but {setup.env_name} has {found}; "
                f"use {others}, or a2c, ppo, ppo2 or svpg"
            )
        self._setup, self._device = setup, use_device(setup.device)
        self.settings: Any = settings

    def set_up(self, rates: Mapping[str, float], *networks: Network, others: Iterable[str] = ()) -> None:
        """Set the step sizes of the trained parts, and choose the kernel that these networks support."""
        self._rates = {name: (rate, lr_factor(self.settings, rate)) for name, rate in rates.items()}
        specs = [network.spec for network in networks]
        optimizer = optimizer_blockers(self.settings.optimizer)
        blockers = [*network_blockers(*specs, device=self._setup.device), *optimizer, *others]
        how = "plain networks on the CPU, with hand-written derivatives"
        self.kernel: Kernel = choose_kernel(self.settings.kernel, blockers=blockers, fused=how)
        self._steps: Callable[..., GradientSteps[Any, Any]] = (
            fused(self.definition) if self.kernel.name == "fused" else self.definition
        )

    def first_state(self, parts: Mapping[str, Params]) -> LearnerState:
        """Build the state before the first update from the initial arrays of all parts."""
        optimizers = {name: initial_state(self.settings.optimizer, parts[name]) for name in self._rates}
        return state_of(self.definition.layout, parts, optimizers, dict.fromkeys(self.counters, 0))

    def rates(self, state: LearnerState) -> dict[str, float]:
        """Return the trained parts' step sizes for the iteration that starts from a state."""
        count = int(state.extra[NUM_UPDATES])
        return {name: rate * factor(count) for name, (rate, factor) in self._rates.items()}

    def gradient_steps(self, state: LearnerState, *, parallel: ParallelMap = map) -> GradientSteps[Any, Any]:
        """Return working copies of a state, on which the chosen kernel takes gradient steps."""
        of, discount = (self.settings, self.networks, state), self._setup.processing.discount
        return self._steps(*of, discount=discount, rates=self.rates(state), device=self._device, parallel=parallel)

    def shown(self, minibatch: Minibatch) -> Minibatch:
        """Return the minibatch that gradient steps see; by default, the minibatch itself."""
        return minibatch

    @abstractmethod
    def noise(self, minibatch: Minibatch, rng: np.random.Generator) -> DrawnNoise:
        """Draw the noise for a gradient step on this minibatch."""

    def filling_params(self, state: LearnerState, num_tasks: int) -> TaskParams:
        """Return the task parameters for prefilling the buffer; by default, the acting parameters."""
        return self.acting_params(state, num_tasks)

    def described(self, state: LearnerState) -> Metrics:
        """Return metrics of the iteration that starts from this state, in addition to gradient-step metrics."""
        return {}

    def update(
        self, state: LearnerState, experience: Batches, *, run_seed: int, iteration: int, parallel: ParallelMap = map
    ) -> tuple[LearnerState, Metrics]:
        """Take one gradient step per minibatch. Metrics are means over the steps, or NaN if there are none."""
        rng = generator(run_seed, "updates", iteration)
        steps = self.gradient_steps(state, parallel=parallel)
        each = [steps.step(minibatch, self.noise(minibatch, rng)) for minibatch in map(self.shown, experience)]
        updated = steps.state()
        parts = {called: self.definition.layout[name].of(updated) for name, called in self.finite.items()}
        require_finite_params(parts, stage="update", advice=f"Lower {self.lower}")
        # Read metrics at the end: reading one waits for the device.
        table = [[float(one[name]) for name in self.metrics] for one in each]
        averages = np.mean(table, axis=0) if table else np.full(len(self.metrics), np.nan)
        metrics = dict(zip(self.metrics, averages.tolist(), strict=True))
        return updated, metrics | {"gradient_steps": float(len(table))} | self.described(state)

"""Optimizers from torch.optim with their state as plain arrays, Adam and RMSprop on a single vector, and schedules."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from pydantic import JsonValue
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from metaloom.pipeline.nn import optimization, optimizers
from metaloom.pipeline.nn.optimization import LearningRate, OptimizerConfig, ScheduledSteps, TorchScheduler
from metaloom.pipeline.nn.optimizers import FIRST_MOMENT, SECOND_MOMENT, STEP_COUNT, AdamInPlace, RMSpropInPlace
from metaloom.pipeline.schema import ConfigError, suggestion
from metaloom.pipeline.types import Array, Params

_VECTOR = "vector"  # parameter name that the state of a single-vector optimizer uses
_OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    name: value
    for name, value in vars(torch.optim).items()
    if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
}


class TorchOptimizer:
    """A torch.optim optimizer that updates the named tensors `params` in place, starting from a stored state if given.

    Its state has an entry per quantity and tensor, such as `exp_avg.policy.output.bias`, and the step count. Before the
    first step, entries are zero placeholders, so that the names of a learner's arrays never change. Raises ConfigError
    if the optimizer does not exist, rejects its options or these parameters, or needs more than gradients.
    """

    def __init__(
        self, config: OptimizerConfig, params: Mapping[str, Tensor], state: Mapping[str, Array] | None = None
    ) -> None:
        self._params = {name: value.detach() for name, value in params.items()}
        self._kinds = _tried(config, self._params)
        self._optimizer = _build(config, self._params)
        self._count = 0 if state is None else int(state[STEP_COUNT])
        if state is not None and self._count:
            for name, kinds in self._kinds.items():
                kept: dict[str, Any] = {}
                for key, kind in kinds.items():
                    array = state[f"{key}.{name}"]
                    if isinstance(kind, Tensor):
                        kept[key] = torch.as_tensor(np.array(array, order="C")).to(kind.device)
                    else:
                        kept[key] = array.item()
                self._optimizer.state[self._params[name]] = kept

    def step(self, gradients: Mapping[str, Tensor] | Tensor, learning_rate: float) -> None:
        """Update in place the parameters for which gradients are given."""
        for name, gradient in ({_VECTOR: gradients} if isinstance(gradients, Tensor) else gradients).items():
            self._params[name].grad = gradient
        self._optimizer.param_groups[0]["lr"] = learning_rate
        self._optimizer.step()
        self._count += 1

    @property
    def state(self) -> Params:
        """Copy of the optimizer state, keyed by quantity and parameter."""
        arrays: Params = {STEP_COUNT: np.array(self._count, np.int64)}
        for name, kinds in self._kinds.items():
            now: Mapping[str, Tensor | float] = self._optimizer.state[self._params[name]] if self._count else {}
            for key, kind in kinds.items():
                arrays[f"{key}.{name}"] = _array(now[key]) if key in now else np.zeros_like(_array(kind))
        return arrays


@dataclass(frozen=True)
class TorchOptimizerSteps:
    """Functional form of TorchOptimizer on NumPy arrays. See nn.optimizers.Adam."""

    config: OptimizerConfig
    learning_rate: float

    def initialize(self, params: Mapping[str, Array]) -> Params:
        return TorchOptimizer(self.config, _tensors(params)).state

    def step(
        self, params: Mapping[str, Array], gradients: Mapping[str, Array], state: Mapping[str, Array]
    ) -> tuple[Params, Params]:
        stepped = _tensors({name: params[name] for name in gradients})
        optimizer = TorchOptimizer(self.config, stepped, state)
        optimizer.step(_tensors(gradients), self.learning_rate)
        return {**params, **{name: value.numpy() for name, value in stepped.items()}}, optimizer.state


def _tensors(arrays: Mapping[str, Array]) -> dict[str, Tensor]:
    # Copy, since stored arrays may be read-only.
    return {name: torch.as_tensor(np.array(value, order="C")) for name, value in arrays.items()}


def _tried(config: OptimizerConfig, params: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor | float]]:
    """Return the quantities that an optimizer stores per parameter, or raise ConfigError if a step on copies fails."""
    copies = {name: value.clone() for name, value in params.items()}
    try:
        optimizer = _build(config, copies)
        for value in copies.values():
            value.grad = torch.zeros_like(value)
        optimizer.step()
    except (LookupError, TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"algorithm.optimizer: torch.optim.{config.torch_name} with options {config.options} cannot take a step "
            f"from gradients of {len(params)} parameters: {error}"
        ) from None
    return {
        name: {key: kind for key, kind in optimizer.state[value].items() if isinstance(kind, Tensor | int | float)}
        for name, value in copies.items()
    }


def _build(config: OptimizerConfig, params: Mapping[str, Tensor]) -> torch.optim.Optimizer:
    if config.torch_name not in _OPTIMIZERS:
        names = [*optimization.SHORT_NAMES, *_OPTIMIZERS]
        raise ConfigError(
            f"algorithm.optimizer: torch {torch.__version__} has no torch.optim.{config.torch_name}; "
            f"use one of {', '.join(names)}{suggestion(config.torch_name, names)}"
        )
    return _OPTIMIZERS[config.torch_name](list(params.values()), **config.options)


def _array(value: Tensor | float) -> Array:
    return value.detach().cpu().numpy().copy() if isinstance(value, Tensor) else np.array(value)


def _like(vector: Tensor, array: Array) -> Tensor:
    return torch.tensor(array, dtype=vector.dtype, device=vector.device)


class AdamOnVector:
    """Adam on a torch vector with torch's fused kernel, equivalent to AdamInPlace."""

    def __init__(self, vector: Tensor, state: Mapping[str, Array], epsilon: float = AdamInPlace.epsilon) -> None:
        self._vector, self._epsilon = vector, epsilon
        self._first, self._second = (_like(vector, state[name]) for name in (FIRST_MOMENT, SECOND_MOMENT))
        # The kernel requires a float32 count.
        self._count = torch.tensor(float(state[STEP_COUNT]), device=vector.device)

    def step(self, gradient: Tensor, learning_rate: float) -> None:
        """Update the vector in place with a gradient [D]."""
        self._count += 1
        vectors = ([self._vector], [gradient], [self._first], [self._second], [], [self._count])
        constants = {"beta1": AdamInPlace.beta_1, "beta2": AdamInPlace.beta_2, "eps": self._epsilon}
        off = {"weight_decay": 0.0, "amsgrad": False, "maximize": False}
        torch._fused_adam_(*vectors, lr=learning_rate, **constants, **off)  # pyright: ignore

    @property
    def state(self) -> Params:
        """Copy of the optimizer state, keyed by name."""
        count = np.array(int(self._count), np.int64)
        return {FIRST_MOMENT: _array(self._first), SECOND_MOMENT: _array(self._second), STEP_COUNT: count}


class RMSpropOnVector:
    """RMSprop on a torch vector, equivalent to RMSpropInPlace."""

    def __init__(self, vector: Tensor, state: Mapping[str, Array], epsilon: float = RMSpropInPlace.epsilon) -> None:
        self._vector, self._second, self._epsilon = vector, _like(vector, state[SECOND_MOMENT]), epsilon

    def step(self, gradient: Tensor, learning_rate: float) -> None:
        self._second.mul_(RMSpropInPlace.beta).addcmul_(gradient, gradient, value=1 - RMSpropInPlace.beta)
        self._vector.addcdiv_(gradient, self._second.sqrt().add_(self._epsilon), value=-learning_rate)

    @property
    def state(self) -> Params:
        return {SECOND_MOMENT: _array(self._second)}


_ON_VECTOR: Mapping[str, type[AdamOnVector | RMSpropOnVector]] = {"adam": AdamOnVector, "rmsprop": RMSpropOnVector}


def _of_torch(
    config: OptimizerConfig, vector: Tensor, state: Mapping[str, Array] | None, epsilon: float | None = None
) -> TorchOptimizer:
    # Keep this package's default ε when other options are set.
    known = optimizers.IN_PLACE.get(config.name)
    defaults: dict[str, JsonValue] = {"eps": known.epsilon if epsilon is None else epsilon} if known else {}
    return TorchOptimizer(config.model_copy(update={"options": defaults | config.options}), {_VECTOR: vector}, state)


def vector_optimizer(
    config: OptimizerConfig, vector: Tensor, state: Mapping[str, Array], *, epsilon: float | None = None
) -> AdamOnVector | RMSpropOnVector | TorchOptimizer:
    """Return an optimizer that updates a vector in place, restored from a state."""
    if is_customary(config):
        return _ON_VECTOR[config.name](vector, state, epsilon or optimizers.IN_PLACE[config.name].epsilon)
    return _of_torch(config, vector, state, epsilon)


def initial_state(config: OptimizerConfig, params: Mapping[str, Array]) -> Params:
    """Return the optimizer state before the first step, or raise ConfigError if the optimizer rejects its options."""
    vector = np.concatenate([np.ravel(value) for value in params.values()])
    if is_customary(config):
        return optimizers.IN_PLACE[config.name].initial(vector)
    return _of_torch(config, torch.from_numpy(vector), None).state


def is_customary(config: OptimizerConfig) -> bool:
    """Return True for Adam or RMSprop with default options, which fused kernels also implement."""
    return config.name in optimizers.IN_PLACE and not config.options


_REFUSALS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RuntimeError)
"""Exceptions that torch's schedulers raise for invalid options."""
LrFactor = Callable[[int], float]
"""Function that maps the number of updates to the factor by which learning rates are multiplied."""

_SCHEDULERS: Mapping[str, Callable[..., LRScheduler]] = {
    name: value
    for name, value in vars(torch.optim.lr_scheduler).items()
    if isinstance(value, type) and issubclass(value, LRScheduler) and value is not LRScheduler and name[0] != "_"
}


def lr_factor(settings: LearningRate | ScheduledSteps, learning_rate: float) -> LrFactor:
    """Return an algorithm's learning-rate schedule as a function from the number of updates to a factor.

    `learning_rate` is for torch schedulers that use absolute learning rates, such as OneCycleLR.

    Raises:
        ConfigError: the scheduler does not exist, rejects its options, or needs more than the number of updates. The
            returned function also raises it for updates after the schedule's end.
    """
    schedule = settings.lr_schedule
    if not isinstance(schedule, TorchScheduler):
        horizon, decay = settings.lr_horizon, settings.lr_decay
        return partial(pow, decay) if horizon is None else lambda count: max(0.0, 1 - count / horizon)
    if (scheduler := _SCHEDULERS.get(schedule.name)) is None:
        raise ConfigError(
            f"algorithm.lr_schedule: torch {torch.__version__} has no torch.optim.lr_scheduler.{schedule.name}; "
            f"use one such as {', '.join(optimization.FROM_A_COUNT)}{suggestion(schedule.name, _SCHEDULERS)}"
        )

    def factor_after(num_updates: int) -> float:
        try:
            return factor(num_updates)
        except _REFUSALS as error:  # for example after the end of a schedule
            raise _refused(schedule, f"after {num_updates} updates: {error}") from None

    try:
        factor = _TorchFactor(scheduler, schedule.options, learning_rate)
        # Some invalid options fail only in the first step.
        factor(1)
    except _REFUSALS as error:
        raise _refused(schedule, str(error)) from None
    return factor_after


def _refused(schedule: TorchScheduler, problem: str) -> ConfigError:
    return ConfigError(
        f"algorithm.lr_schedule: torch.optim.lr_scheduler.{schedule.name} with options {schedule.options}: {problem}"
    )


class _TorchFactor:
    """Learning-rate factor of a torch scheduler. Schedulers only step forward, so an earlier update restarts it."""

    def __init__(
        self, scheduler: Callable[..., LRScheduler], options: Mapping[str, JsonValue], learning_rate: float
    ) -> None:
        self._make, self._options, self._learning_rate = scheduler, options, learning_rate
        self._start()

    def __call__(self, num_updates: int) -> float:
        """Return the factor after `num_updates` updates, or raise ValueError if it is negative or not finite."""
        if num_updates < self._done:
            self._start()
        while self._done < num_updates:
            # This updates no parameters, but torch warns if a scheduler steps before its optimizer.
            self._optimizer.step()
            self._scheduler.step()
            self._done += 1
        factor = float(self._optimizer.param_groups[0]["lr"]) / self._learning_rate
        if not (math.isfinite(factor) and factor >= 0):
            raise ValueError(f"the step-size factor is {factor} from update {num_updates} on")
        return factor

    def _start(self) -> None:
        # Adadelta has no momentum, so schedulers that cycle momentum fail unless that is turned off.
        self._optimizer = torch.optim.Adadelta([torch.zeros(1)], lr=self._learning_rate)
        self._scheduler = self._make(self._optimizer, **self._options)
        self._done = 0

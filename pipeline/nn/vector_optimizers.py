"""Optimizers of torch on one vector, which they change in place; their state is plain arrays."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from pydantic import JsonValue
from torch import Tensor

from metaloom.pipeline.nn.optimization import OptimizerConfig
from metaloom.pipeline.nn.optimizers import (
    FIRST_MOMENT,
    IN_PLACE,
    SECOND_MOMENT,
    STEP_COUNT,
    AdamInPlace,
    RMSpropInPlace,
)
from metaloom.pipeline.nn.torch_optimizers import TorchOptimizer
from metaloom.pipeline.types import Array, Params

_VECTOR = "vector"


class AdamOnVector:
    """Adam by torch's fused kernel; names of its state, formula and ε are those of AdamInPlace."""

    def __init__(self, vector: Tensor, state: Mapping[str, Array], epsilon: float = AdamInPlace.epsilon) -> None:
        self._vector, self._epsilon = vector, epsilon
        self._first, self._second = (_like(vector, state[name]) for name in (FIRST_MOMENT, SECOND_MOMENT))
        # Not in the vector's precision: float32 is what the kernel takes.
        self._count = torch.tensor(float(state[STEP_COUNT]), device=vector.device)

    def step(self, gradient: Tensor, learning_rate: float) -> None:
        """Move the vector against a gradient [D]."""
        self._count += 1
        torch._fused_adam_(  # pyright: ignore[reportPrivateImportUsage, reportPrivateUsage]
            [self._vector],
            [gradient],
            [self._first],
            [self._second],
            [],
            [self._count],
            lr=learning_rate,
            beta1=AdamInPlace.beta_1,
            beta2=AdamInPlace.beta_2,
            eps=self._epsilon,
            weight_decay=0.0,
            amsgrad=False,
            maximize=False,
        )

    @property
    def state(self) -> Params:
        """All it keeps, by name, as arrays of their own."""
        count = np.array(int(self._count), np.int64)
        return {FIRST_MOMENT: _array(self._first), SECOND_MOMENT: _array(self._second), STEP_COUNT: count}


class RMSpropOnVector:
    """RMSprop; names of its state, formula and ε are those of RMSpropInPlace."""

    def __init__(self, vector: Tensor, state: Mapping[str, Array], epsilon: float = RMSpropInPlace.epsilon) -> None:
        self._vector, self._second, self._epsilon = vector, _like(vector, state[SECOND_MOMENT]), epsilon

    def step(self, gradient: Tensor, learning_rate: float) -> None:
        """Move the vector against a gradient [D]."""
        self._second.mul_(RMSpropInPlace.beta).addcmul_(gradient, gradient, value=1 - RMSpropInPlace.beta)
        self._vector.addcdiv_(gradient, self._second.sqrt().add_(self._epsilon), value=-learning_rate)

    @property
    def state(self) -> Params:
        """All it keeps, by name, as arrays of their own."""
        return {SECOND_MOMENT: _array(self._second)}


_ON_VECTOR: Mapping[str, type[AdamOnVector | RMSpropOnVector]] = {"adam": AdamOnVector, "rmsprop": RMSpropOnVector}


class OfTorch:
    """Any other optimizer of torch."""

    def __init__(
        self, config: OptimizerConfig, vector: Tensor, state: Mapping[str, Array] | None, epsilon: float | None = None
    ) -> None:
        # ε stays what it is where only other options are asked for.
        known = IN_PLACE.get(config.name)
        defaults: dict[str, JsonValue] = {"eps": known.epsilon if epsilon is None else epsilon} if known else {}
        config = config.model_copy(update={"options": defaults | config.options})
        self._optimizer = TorchOptimizer(config, {_VECTOR: vector}, state)

    def step(self, gradient: Tensor, learning_rate: float) -> None:
        """Move the vector against a gradient [D]."""
        self._optimizer.step({_VECTOR: gradient}, learning_rate)

    @property
    def state(self) -> Params:
        """All it keeps, by name, as arrays of their own."""
        return self._optimizer.state


def vector_optimizer(
    config: OptimizerConfig, vector: Tensor, state: Mapping[str, Array], *, epsilon: float | None = None
) -> AdamOnVector | RMSpropOnVector | OfTorch:
    """Return the optimizer that goes on from a state, for a vector that it changes in place.

    Args:
        config: which optimizer.
        vector: that it changes.
        state: from `initial_state`, or what `state` gave.
        epsilon: of Adam and RMSprop where the options have none; that of AdamInPlace if not given.
    """
    if is_customary(config):
        return _ON_VECTOR[config.name](vector, state, epsilon or IN_PLACE[config.name].epsilon)
    return OfTorch(config, vector, state, epsilon)


def initial_state(config: OptimizerConfig, params: Mapping[str, Array]) -> Params:
    """Return the state before the first step.

    Raises:
        ConfigError: torch has no such optimizer, or it refuses its options.
    """
    vector = np.concatenate([np.ravel(value) for value in params.values()])
    if is_customary(config):
        return IN_PLACE[config.name].initial(vector)
    return OfTorch(config, torch.from_numpy(vector), None).state


def is_customary(config: OptimizerConfig) -> bool:
    """Tell whether it is Adam or RMSprop as actor-critics are used to it, which kernels know too."""
    return config.name in IN_PLACE and not config.options


def _like(vector: Tensor, array: Array) -> Tensor:
    return torch.tensor(array, dtype=vector.dtype, device=vector.device)


def _array(value: Tensor) -> Array:
    return value.detach().cpu().numpy().copy()

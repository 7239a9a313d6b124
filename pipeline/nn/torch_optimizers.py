"""Any optimizer of torch.optim, with its state as plain arrays instead of a pickle."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from metaloom.pipeline.nn.optimization import SHORT_NAMES, OptimizerConfig
from metaloom.pipeline.nn.optimizers import STEP_COUNT
from metaloom.pipeline.schema import ConfigError, suggestion
from metaloom.pipeline.types import Array, Params

_OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    name: value
    for name, value in vars(torch.optim).items()
    if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
}


class TorchOptimizer:
    """An optimizer of torch.optim that changes tensors in place.

    Its state has a name for every quantity and tensor, such as `exp_avg.policy.output.bias`, and counts steps; at count
    0 all else is zero and stands for nothing, so that a learner's arrays have the same names from the start.

    Args:
        config: which optimizer.
        params: what it changes, by name, on any device.
        state: what `state` gave, here or elsewhere; None before the first step.

    Raises:
        ConfigError: torch has no such optimizer, it refuses its options or these parameters, or it needs more than
            gradients.
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

    def step(self, gradients: Mapping[str, Tensor], learning_rate: float) -> None:
        """Change the parameters that have a gradient."""
        for name, gradient in gradients.items():
            self._params[name].grad = gradient
        self._optimizer.param_groups[0]["lr"] = learning_rate
        self._optimizer.step()
        self._count += 1

    @property
    def state(self) -> Params:
        """Every quantity by name, as arrays of their own."""
        arrays: Params = {STEP_COUNT: np.array(self._count, np.int64)}
        for name, kinds in self._kinds.items():
            now: Mapping[str, Tensor | float] = self._optimizer.state[self._params[name]] if self._count else {}
            for key, kind in kinds.items():
                arrays[f"{key}.{name}"] = _array(now[key]) if key in now else np.zeros_like(_array(kind))
        return arrays


@dataclass(frozen=True)
class TorchSteps:
    """As TorchOptimizer, as a function: parameters and state go in and come out as arrays. See nn.optimizers.Adam."""

    config: OptimizerConfig
    learning_rate: float

    def initialize(self, params: Mapping[str, Array]) -> Params:
        """State before the first step; see Adam."""
        return TorchOptimizer(self.config, _tensors(params)).state

    def step(
        self, params: Mapping[str, Array], gradients: Mapping[str, Array], state: Mapping[str, Array]
    ) -> tuple[Params, Params]:
        """Parameters and state after one step; see Adam."""
        stepped = _tensors({name: params[name] for name in gradients})
        optimizer = TorchOptimizer(self.config, stepped, state)
        optimizer.step(_tensors(gradients), self.learning_rate)
        return {**params, **{name: value.numpy() for name, value in stepped.items()}}, optimizer.state


def _tensors(arrays: Mapping[str, Array]) -> dict[str, Tensor]:
    # Copied, since stored arrays may be read-only.
    return {name: torch.as_tensor(np.array(value, order="C")) for name, value in arrays.items()}


def _tried(config: OptimizerConfig, params: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor | float]]:
    """Quantities that a step leaves, by parameter; from a step on copies, which also finds what is wrong."""
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
        names = [*SHORT_NAMES, *_OPTIMIZERS]
        raise ConfigError(
            f"algorithm.optimizer: torch {torch.__version__} has no torch.optim.{config.torch_name}; "
            f"required one of {', '.join(names)}{suggestion(config.torch_name, names)}"
        )
    return _OPTIMIZERS[config.torch_name](list(params.values()), **config.options)


def _array(value: Tensor | float) -> Array:
    return value.detach().cpu().numpy().copy() if isinstance(value, Tensor) else np.array(value)

"""A user's own torch.nn.Module as a function of explicit parameters."""

import copy
import json
import threading
from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from metaloom.pipeline.nn.mlp import scaled
from metaloom.pipeline.nn.module_checks import (
    learned_parameters,
    require_function,
    require_learnable,
    require_room_for,
    seeded,
)
from metaloom.pipeline.nn.spec import NETWORKS, NetworkSpec
from metaloom.pipeline.schema import ConfigError
from metaloom.pipeline.types import Params, Shapes


class ModuleCopies(threading.local):
    """Copies of a module: it is not safe to call from several threads with parameters of their own."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._copies: dict[tuple[str, str], tuple[nn.Module, dict[str, nn.Parameter]]] = {}

    def like(self, inputs: Tensor) -> tuple[nn.Module, dict[str, nn.Parameter]]:
        """The module of this thread, with its buffers where the inputs are and of their dtype; and its parameters."""
        key = str(inputs.device), str(inputs.dtype)
        if key not in self._copies:
            module = copy.deepcopy(self._module).to(device=inputs.device, dtype=inputs.dtype)
            self._copies[key] = module, learned_parameters(module)
        return self._copies[key]


class ModuleNetwork:
    """A module of the user's, constructed as Class(input_shape, output_size, **options). See Network.

    It is called with float32 inputs [N, *input_shape], already scaled, and gives [N, output_size]. It may have constant
    buffers and frozen parameters (requires_grad=False), which stay as the constructor makes them; what it computes may
    not depend on anything else that changes, on randomness, or on other rows.
    """

    def __init__(self, prefix: str, spec: NetworkSpec) -> None:
        self.prefix, self.spec = prefix, spec
        self._shape = spec.input_shape if not spec.extra_size else (spec.input_size,)
        if spec.extra_size and len(spec.input_shape) != 1:
            raise ConfigError(
                f"policy.network is {spec.name}, but the algorithm puts {spec.extra_size} numbers behind observations "
                f"of shape {spec.input_shape}; required policy.network=cnn, or observations of one axis"
            )
        try:
            self._class: type[nn.Module] = NETWORKS.find(spec.name, nn.Module)
        except ConfigError as problem:
            raise ConfigError(f"policy.network: {problem}") from problem
        self._module = _checked(self._class, spec.name, self._shape, spec.output_size, json.dumps(dict(spec.options)))
        self._copies = ModuleCopies(self._module)

    @property
    def shapes(self) -> Shapes:
        return {f"{self.prefix}.{name}": tuple(value.shape) for name, value in learned_parameters(self._module).items()}

    def initialize(self, rng: np.random.Generator) -> Params:
        """Parameters as the module's own constructor draws them, from a seed that the generator gives; see Network."""
        seed = int(rng.integers(2**63))
        module = _construct(self._class, self._shape, self.spec.output_size, dict(self.spec.options), seed)
        return {
            f"{self.prefix}.{name}": value.detach().numpy().copy() for name, value in learned_parameters(module).items()
        }

    def __call__(self, params: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
        """Outputs; see Network."""
        x = scaled(self.spec, inputs).reshape(*inputs.shape[:-1], *self._shape)
        module, parameters = self._copies.like(x)
        own = {name: params[f"{self.prefix}.{name}"] for name in parameters}
        if x.dim() == len(self._shape) + 1:
            if torch.is_grad_enabled():
                return functional_call(module, own, (x,))
            # To exchange the data of this thread's copy takes a tenth of the time, and acting calls it very often.
            for name, parameter in parameters.items():
                parameter.data = own[name]
            return module(x)

        def one_task(task_params: dict[str, Tensor], task_inputs: Tensor) -> Tensor:
            return functional_call(module, task_params, (task_inputs,))

        return vmap(one_task)(own, x)


def _construct(factory: Any, shape: tuple[int, ...], output_size: int, options: Mapping[str, Any], seed: int) -> Any:
    with seeded(seed):
        return factory(shape, output_size, **options)


@lru_cache(maxsize=16)
def _checked(factory: Any, name: str, shape: tuple[int, ...], output_size: int, options: str) -> nn.Module:
    """Construct the module, with the same buffers in any process, and check it.

    Raises:
        ConfigError: it cannot be constructed, or is no function of its parameters and single inputs.
    """
    require_room_for(lambda: _construct(factory, shape, output_size, json.loads(options), seed=0))
    arguments = ", ".join([str(shape), str(output_size), *(f"{k}={v!r}" for k, v in json.loads(options).items())])
    try:
        module = _construct(factory, shape, output_size, json.loads(options), seed=0)
    except Exception as problem:
        raise ConfigError(
            f"policy.network: {name}({arguments}) raised {type(problem).__name__}: {problem}; a network's class is "
            "called with (input_shape, output_size), and with policy.network_options by keyword"
        ) from problem
    require_learnable(module, name)
    with seeded(0):
        inputs = torch.rand(4, *shape)
        require_function(module, name, [inputs], partial(_check_outputs, name, inputs, output_size))
    return module


def _check_outputs(name: str, inputs: Tensor, output_size: int, outputs: Any) -> None:
    if not isinstance(outputs, Tensor) or outputs.shape != (len(inputs), output_size):
        found = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        raise ConfigError(
            f"policy.network: {name} gives {found} for inputs of shape {tuple(inputs.shape)}; "
            f"required {(len(inputs), output_size)}"
        )

"""Custom torch.nn.Modules as functions of explicit parameters, and checks of these modules."""

import copy
import json
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from metaloom.pipeline.device import ON_DEVICE, asks_for_gpu
from metaloom.pipeline.memory import require_room
from metaloom.pipeline.nn.spec import NETWORKS, NetworkSpec
from metaloom.pipeline.schema import ConfigError
from metaloom.pipeline.types import Params, Shapes


@contextmanager
def seeded(seed: int) -> Generator[None]:
    """Within the block, seed torch's global generator; restore its state afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def learned_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return a module's trainable parameters, keyed by name."""
    return {name: value for name, value in module.named_parameters() if value.requires_grad}


def require_function(module: nn.Module, name: str, inputs: Sequence[Tensor], check: Callable[[Any], None]) -> Any:
    """Check that a module is a rowwise function of its parameters and inputs, and return its outputs.

    Raises ConfigError if the outputs also depend on anything else, or if the module changes its own state.
    """
    # Run without and with gradients, as in acting and learning, since a module can tell the difference.
    with torch.no_grad():
        outputs = _repeated(module, name, inputs, check)
    _repeated(module, name, inputs, check)
    # Compare 3 of 4 rows. Products of another size may differ in the last bits, but statistics over rows differ more.
    with torch.no_grad():
        of_fewer_rows = module(*(part[:3] for part in inputs))
    for fewer, of_all in zip(_parts(of_fewer_rows), _parts(outputs), strict=True):
        if not torch.allclose(fewer, of_all[:3], rtol=1e-3, atol=1e-4):
            raise ConfigError(
                f"policy.network: the output of {name} for one row depends on the other rows, as in batch "
                "normalization; each output must depend on its own row only"
            )
    return outputs


def require_learnable(module: nn.Module, name: str) -> None:
    """Raise ConfigError if a module has no trainable parameters, or parameters that are not float32."""
    if not learned_parameters(module):
        raise ConfigError(f"policy.network: {name} has no trainable parameters; expected at least one")
    for key, value in module.named_parameters():
        if value.dtype != torch.float32:
            raise ConfigError(f"policy.network: parameter {key} of {name} is {value.dtype}; expected torch.float32")


def require_room_for(construct: Callable[[], nn.Module]) -> None:
    """Raise ConfigError if training a module would exceed this machine's memory, without allocating its parameters."""
    try:
        with torch.device("meta"):
            module = construct()
        shapes = {name: tuple(value.shape) for name, value in module.named_parameters()}
    except Exception:  # the module needs real values, or fails later with a better message
        return
    require_room(shapes, setting="policy.network")


def _repeated(module: nn.Module, name: str, inputs: Sequence[Tensor], check: Callable[[Any], None]) -> Any:
    """Return a module's outputs, after checking that they are repeatable and that the module changes no state."""
    random_state, buffers = torch.get_rng_state(), {key: value.clone() for key, value in module.named_buffers()}
    try:
        outputs, again = module(*inputs), module(*inputs)
    except Exception as problem:
        shapes = " and ".join(str(tuple(part.shape)) for part in inputs)
        required = ON_DEVICE if asks_for_gpu(problem) else "it must return outputs"
        raise ConfigError(
            f"policy.network: {name} raised {type(problem).__name__} on inputs of shape {shapes}: {problem}; {required}"
        ) from problem
    for given in (outputs, again):
        check(given)
    if not torch.equal(torch.get_rng_state(), random_state):
        raise ConfigError(
            f"policy.network: {name} draws random numbers when it is called, as dropout does, so no stage could be "
            "recomputed; remove the random layers"
        )
    for key, value in module.named_buffers():
        if not torch.equal(value, buffers[key]):
            raise ConfigError(
                f"policy.network: {name} changes its buffer {key} when it is called, as batch normalization does, "
                "and no stage stores that; use layers that depend only on their parameters, such as LayerNorm"
            )
    if not all(torch.equal(*pair) for pair in zip(_parts(again), _parts(outputs), strict=True)):
        raise ConfigError(
            f"policy.network: {name} returns different outputs for the same inputs on a second call, so no stage "
            "could be recomputed; outputs must depend only on parameters and inputs"
        )
    return outputs


def _parts(outputs: Any) -> tuple[Tensor, ...]:
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


class ModuleCopies(threading.local):
    """Per-thread copies of a module, since calls with different parameters are not thread-safe."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._copies: dict[tuple[str, str], tuple[nn.Module, dict[str, nn.Parameter]]] = {}

    def like(self, inputs: Tensor) -> tuple[nn.Module, dict[str, nn.Parameter]]:
        """Return this thread's copy of the module, on the device and in the dtype of `inputs`, and its parameters."""
        key = str(inputs.device), str(inputs.dtype)
        if key not in self._copies:
            module = copy.deepcopy(self._module).to(device=inputs.device, dtype=inputs.dtype)
            self._copies[key] = module, learned_parameters(module)
        return self._copies[key]


_float32_alone = ContextVar("_float32_alone", default=False)


@contextmanager
def float32_alone() -> Generator[None]:
    """Within the block, reject networks whose outputs are not float32. Earlier versions allowed them."""
    before = _float32_alone.set(True)
    try:
        yield
    finally:
        _float32_alone.reset(before)


class ModuleNetwork:
    """Network that wraps a custom module, constructed as Class(input_shape, output_size, **options). See Network.

    The module is called with scaled float32 inputs [N, *input_shape] and returns [N, output_size]. It may have constant
    buffers and frozen parameters (requires_grad=False), which keep their initial values. Each output row must depend
    only on the parameters and its own input row, without other state or randomness.
    """

    def __init__(self, prefix: str, spec: NetworkSpec) -> None:
        self.prefix: str = prefix
        self.spec: NetworkSpec = spec
        self._shape = spec.input_shape if not spec.extra_size else (spec.input_size,)
        if spec.extra_size and len(spec.input_shape) != 1:
            raise ConfigError(
                f"policy.network is {spec.name}, but the algorithm appends {spec.extra_size} values to observations "
                f"of shape {spec.input_shape}; use policy.network=cnn, or one-dimensional observations"
            )
        try:
            self._class: type[nn.Module] = NETWORKS.find(spec.name, nn.Module)
        except ConfigError as problem:
            raise ConfigError(f"policy.network: {problem}") from problem
        options = json.dumps(dict(spec.options))
        self._module, dtype = _checked(self._class, spec.name, self._shape, spec.output_size, options)
        if dtype != torch.float32 and _float32_alone.get():
            raise ConfigError(f"policy.network: {spec.name} returns outputs of {dtype}; expected torch.float32")
        self._copies = ModuleCopies(self._module)

    @property
    def shapes(self) -> Shapes:
        return {f"{self.prefix}.{name}": tuple(value.shape) for name, value in learned_parameters(self._module).items()}

    def initialize(self, rng: np.random.Generator) -> Params:
        seed = int(rng.integers(2**63))
        module = _construct(self._class, self._shape, self.spec.output_size, dict(self.spec.options), seed)
        return {
            f"{self.prefix}.{name}": value.detach().numpy().copy() for name, value in learned_parameters(module).items()
        }

    def __call__(self, params: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
        x = scaled(self.spec, inputs).reshape(*inputs.shape[:-1], *self._shape)
        module, parameters = self._copies.like(x)
        own = {name: params[f"{self.prefix}.{name}"] for name in parameters}
        if x.dim() == len(self._shape) + 1:
            if torch.is_grad_enabled():
                return functional_call(module, own, (x,))
            # Swapping the parameter data of this thread's copy is ten times faster than functional_call, which matters
            # in acting.
            for name, parameter in parameters.items():
                parameter.data = own[name]
            return module(x)

        return vmap(lambda task_params, task_inputs: functional_call(module, task_params, (task_inputs,)))(own, x)


def scaled(spec: NetworkSpec, inputs: Tensor) -> Tensor:
    """Return inputs with the observations divided by their scale; extra inputs are unchanged."""
    if spec.input_scale == 1:
        return inputs
    observations, extra = inputs[..., : spec.observation_size], inputs[..., spec.observation_size :]
    return torch.cat([observations / spec.input_scale, extra], -1)


def _construct(factory: Any, shape: tuple[int, ...], output_size: int, options: Mapping[str, Any], seed: int) -> Any:
    with seeded(seed):
        return factory(shape, output_size, **options)


@lru_cache(maxsize=16)
def _checked(
    factory: Any, name: str, shape: tuple[int, ...], output_size: int, options: str
) -> tuple[nn.Module, torch.dtype]:
    """Construct and check a module; return it and its outputs' dtype. Its buffers are the same in all processes."""
    require_room_for(lambda: _construct(factory, shape, output_size, json.loads(options), seed=0))
    arguments = ", ".join([str(shape), str(output_size), *(f"{k}={v!r}" for k, v in json.loads(options).items())])
    try:
        module = _construct(factory, shape, output_size, json.loads(options), seed=0)
    except Exception as problem:
        raise ConfigError(
            f"policy.network: {name}({arguments}) raised {type(problem).__name__}: {problem}; a network's class is "
            "called with (input_shape, output_size), and with policy.network_options by keyword"
            + (f"; {ON_DEVICE}" if asks_for_gpu(problem) else "")
        ) from problem
    require_learnable(module, name)
    with seeded(0):
        inputs = torch.rand(4, *shape)
        outputs = require_function(module, name, [inputs], partial(_check_outputs, name, inputs, output_size))
    return module, outputs.dtype


def _check_outputs(name: str, inputs: Tensor, output_size: int, outputs: Any) -> None:
    if not isinstance(outputs, Tensor) or outputs.shape != (len(inputs), output_size):
        found = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        raise ConfigError(
            f"policy.network: {name} returned {found} for inputs of shape {tuple(inputs.shape)}; "
            f"expected {(len(inputs), output_size)}"
        )

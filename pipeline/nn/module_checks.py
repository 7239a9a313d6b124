"""Checks of a user's torch.nn.Module: whether it is a function of its parameters and of single rows of inputs."""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from metaloom.pipeline.memory import require_room
from metaloom.pipeline.schema import ConfigError


@contextmanager
def seeded(seed: int) -> Generator[None]:
    """Let torch's own generator begin at a seed, and afterwards go on where it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def learned_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are not frozen, by name."""
    return {name: value for name, value in module.named_parameters() if value.requires_grad}


def require_function(
    module: nn.Module, name: str, inputs: Sequence[Tensor], check: Callable[[Any], None] = lambda outputs: None
) -> None:
    """Refuse a module that is no function of its parameters and of single rows of inputs.

    Args:
        module: that is called.
        name: for messages.
        inputs: of four rows each.
        check: refuses outputs of other shapes.

    Raises:
        ConfigError: saying what it does instead.
    """
    # Acting calls a module without gradients, learning with them, and it can tell which.
    with torch.no_grad():
        outputs = _repeated(module, name, inputs, check)
    _repeated(module, name, inputs, check)
    # 3 of 4 rows: products of other numbers of rows may differ in the last bits, statistics over rows by more.
    with torch.no_grad():
        of_fewer_rows = module(*(part[:3] for part in inputs))
    for fewer, of_all in zip(_parts(of_fewer_rows), _parts(outputs), strict=True):
        if not torch.allclose(fewer, of_all[:3], rtol=1e-3, atol=1e-4):
            raise ConfigError(
                f"policy.network: what {name} gives for an input depends on the other rows, as in batch normalization; "
                "required outputs that depend on their own row only"
            )


def require_learnable(module: nn.Module, name: str) -> None:
    """Refuse a module without parameters to learn, or with any that are not float32.

    Raises:
        ConfigError: naming the parameter.
    """
    if not learned_parameters(module):
        raise ConfigError(f"policy.network: {name} has no parameters to learn; required at least one")
    for parameter, value in module.named_parameters():
        if value.dtype != torch.float32:
            raise ConfigError(
                f"policy.network: parameter {parameter} of {name} is {value.dtype}; required torch.float32"
            )


def require_room_for(construct: Callable[[], nn.Module]) -> None:
    """Refuse a module that is too large, by what it would be: made on torch's meta device, it takes no memory."""
    try:
        with torch.device("meta"):
            module = construct()
        shapes = {name: tuple(value.shape) for name, value in module.named_parameters()}
    except Exception:  # it does what can only be done with numbers, or is refused with its reason later
        return
    require_room(shapes, setting="policy.network")


def _repeated(module: nn.Module, name: str, inputs: Sequence[Tensor], check: Callable[[Any], None]) -> Any:
    """Outputs of a module that has to give the same bits again, and change nothing.

    Raises:
        ConfigError: it does not, or cannot be called.
    """
    random_state, buffers = torch.get_rng_state(), {key: value.clone() for key, value in module.named_buffers()}
    try:
        outputs, again = module(*inputs), module(*inputs)
    except Exception as problem:
        shapes = " and ".join(str(tuple(part.shape)) for part in inputs)
        raise ConfigError(
            f"policy.network: {name} raised {type(problem).__name__} on inputs of shape {shapes}: {problem}"
        ) from problem
    check(outputs)
    if not torch.equal(torch.get_rng_state(), random_state):
        raise ConfigError(
            f"policy.network: {name} draws random numbers when it is called, as dropout does, so no stage could be "
            "computed again; leave that out"
        )
    for key, value in module.named_buffers():
        if not torch.equal(value, buffers[key]):
            raise ConfigError(
                f"policy.network: {name} changes its buffer {key} when it is called, as batch normalization does, "
                "which no stage would store; use one that depends on its parameters only, such as LayerNorm"
            )
    if not all(torch.equal(*pair) for pair in zip(_parts(again), _parts(outputs), strict=True)):
        raise ConfigError(
            f"policy.network: {name} gives other outputs when it is called again with the same inputs, so no stage "
            "could be computed again; required outputs that follow from parameters and inputs alone"
        )
    return outputs


def _parts(outputs: Any) -> tuple[Tensor, ...]:
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)

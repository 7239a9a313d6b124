"""Choice between a learner's torch definition and its fused kernel."""

from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from typing import Any

from metaloom.pipeline.algorithms.contract import Kernel, KernelChoice
from metaloom.pipeline.nn.optimization import OptimizerConfig
from metaloom.pipeline.nn.spec import NetworkSpec
from metaloom.pipeline.nn.torch_optimizers import is_customary
from metaloom.pipeline.schema import ConfigError

_FUSED = {
    "actor_critic.gradient_steps.TorchSteps": "actor_critic.FusedSteps",
    "maml.trpo.gauss_newton_product": "gauss_newton.fused_gauss_newton_product",
    "off_policy.dql.DQLDefinition": "dql.DQLKernel",
    "off_policy.sac.SACDefinition": "sac.SACKernel",
    "pearl.learner.PEARLDefinition": "pearl.PEARLKernel",
    "pearl.learner.infer": "pearl.infer",
}
"""Fused kernel in pipeline.kernels for each definition in pipeline.algorithms."""


def fused(definition: Callable[..., object]) -> Callable[..., Any]:
    """Return the fused kernel for a torch definition; its signature may differ."""
    place = f"{definition.__module__}.{definition.__qualname__}".partition(".algorithms.")[2]
    module, _, name = _FUSED[place].rpartition(".")
    return getattr(import_module(f"metaloom.pipeline.kernels.{module}"), name)


def choose_kernel(asked: KernelChoice, *, blockers: Iterable[str], fused: str) -> Kernel:
    """Return the fused kernel if the setting allows it and there are no blockers, otherwise the torch definition.

    Raises ConfigError if the fused kernel was requested but there are blockers.
    """
    if asked == "torch":
        return Kernel("torch", "requested")
    # Policy and critic often have the same blocker.
    if not (reasons := "; ".join(dict.fromkeys(blockers))):
        return Kernel("fused", fused)
    if asked == "fused":
        raise ConfigError(
            f"algorithm.kernel is fused, but {reasons}; the fused kernel supports plain tanh and relu networks on "
            "the CPU only: use algorithm.kernel=auto, which uses torch for all others"
        )
    return Kernel("torch", reasons)


def network_blockers(*networks: NetworkSpec, device: str) -> Iterator[str]:
    """Yield a description of each network or device feature that fused kernels do not support."""
    if device != "cpu":
        yield f"device is {device}"
    for network in networks:
        if network.name != "mlp":
            yield f"network is {network.name}"
        elif network.input_scale != 1:
            yield f"inputs are divided by {network.input_scale:g}"
        elif not network.is_plain:
            last = "" if network.output_activation == "identity" else f" with a final {network.output_activation}"
            yield f"network is an mlp of {network.activation}{last}"


def optimizer_blockers(optimizer: OptimizerConfig) -> Iterator[str]:
    """Yield a description of the optimizer if fused kernels do not support it."""
    if not is_customary(optimizer):
        yield f"optimizer is {optimizer.name}" + (f" with {optimizer.options}" if optimizer.options else "")

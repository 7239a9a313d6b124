from importlib import import_module

import pytest

from metaloom.pipeline.algorithms import kernel_choice
from metaloom.pipeline.algorithms.contract import Kernel
from metaloom.pipeline.algorithms.kernel_choice import choose_kernel, network_blockers
from metaloom.pipeline.config.input import ConfigError
from metaloom.pipeline.nn.spec import NetworkSpec

PLAIN = NetworkSpec("mlp", (3,), 2)


def test_a_plain_network_on_the_cpu_has_a_fused_kernel_unless_torch_is_asked_for():
    blockers = list(network_blockers(PLAIN, NetworkSpec("mlp", (3,), 2, activation="relu"), device="cpu"))

    assert blockers == []
    for asked in ("auto", "fused"):
        assert choose_kernel(asked, blockers=blockers, fused="plain network") == Kernel("fused", "plain network")
    assert choose_kernel("torch", blockers=blockers, fused="plain network") == Kernel("torch", "requested")


@pytest.mark.parametrize(
    ("networks", "device", "reason"),
    [
        ([PLAIN], "cuda", "device is cuda"),
        ([NetworkSpec("cnn", (8, 8, 3), 2)] * 2, "cpu", "network is cnn"),
        ([NetworkSpec("my_nets:Net", (3,), 2)], "cpu", "network is my_nets:Net"),
        ([NetworkSpec("mlp", (3,), 2, activation="SiLU")], "cpu", "network is an mlp of SiLU"),
        ([NetworkSpec("mlp", (3,), 2, output_activation="tanh")], "cpu", "network is an mlp of tanh with a final tanh"),
        ([NetworkSpec("mlp", (3,), 2, input_scale=255)], "cpu", "inputs are divided by 255"),
    ],
)
def test_what_the_fused_kernel_does_not_know_is_computed_by_torch_or_refused(networks, device, reason):
    blockers = list(network_blockers(*networks, device=device))

    assert choose_kernel("auto", blockers=blockers, fused="plain network") == Kernel("torch", reason)
    with pytest.raises(ConfigError, match=f"algorithm.kernel is fused, but {reason}; the .* use algorithm.kernel=auto"):
        choose_kernel("fused", blockers=blockers, fused="plain network")


@pytest.mark.parametrize("place", kernel_choice._FUSED)
def test_every_kernel_is_found_by_its_definition(place):
    module, _, name = place.rpartition(".")
    definition = getattr(import_module(f"metaloom.pipeline.algorithms.{module}"), name)
    assert kernel_choice.fused(definition).__module__.startswith("metaloom.pipeline.kernels.")

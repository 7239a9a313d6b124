"""Modules of the user's own: functions of explicit parameters, or refused."""

import sys
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from metaloom.pipeline.config.input import ConfigError
from metaloom.pipeline.nn.modules import float32_alone
from metaloom.pipeline.nn.networks import Network, build_network
from metaloom.pipeline.nn.spec import NetworkSpec


class Net(nn.Module):
    """Two layers with a constant buffer between them."""

    def __init__(self, input_shape, output_size, *, width=6):
        super().__init__()
        (size,) = input_shape
        self.first, self.norm, self.last = nn.Linear(size, width), nn.LayerNorm(width), nn.Linear(width, output_size)
        self.register_buffer("frequencies", torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(torch.sin(self.first(x) * self.frequencies)))


class Pixels(nn.Module):
    """A convolution that keeps the axes of the image as they are."""

    def __init__(self, input_shape, output_size):
        super().__init__()
        self.conv = nn.Conv2d(input_shape[0], 4, 3, padding=1)
        self.last = nn.Linear(4, output_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.conv(x).mean((2, 3)))


class With(Net):
    """Net with one layer more."""

    def __init__(self, input_shape, output_size, *, layer: str):
        super().__init__(input_shape, output_size)
        options = {"BatchNorm1d": {"num_features": 6}, "Dropout": {}}
        name, _, static = layer.partition("-")
        self.norm = getattr(nn, name)(**options[name], **({"track_running_stats": False} if static else {}))


class Wide(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).unsqueeze(0)


class Failing(Net):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("shapes do not match")


class Drifting(Net):
    """Adds a hundred-thousandth more at every call, which no buffer tells."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) + 1e-5 * self.calls


class Fickle(Net):
    """Answers with a tensor, and with two the next time."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        self.calls += 1
        found = super().forward(x)
        return found if self.calls % 2 else (found, found)


class NoisyWhileLearning(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 0.1 * torch.rand_like(x) if torch.is_grad_enabled() else x)


class Frozen(Net):
    """A first layer that is not to be learned."""

    def __init__(self, input_shape, output_size, *, layers=("first",)):
        super().__init__(input_shape, output_size)
        for layer in layers:
            getattr(self, layer).requires_grad_(False)


class Double(Net):
    def __init__(self, input_shape, output_size):
        super().__init__(input_shape, output_size)
        self.double()


class Doubled(Net):
    def forward(self, inputs):
        return super().forward(inputs).double()


@pytest.fixture(autouse=True)
def own_module(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("nets")
    own = {
        c.__name__: c
        for c in (Net, Pixels, With, Wide, Failing, Drifting, Fickle, NoisyWhileLearning, Frozen, Double, Doubled)
    }
    module.__dict__.update(own, factory=lambda shape, size: "no module")
    monkeypatch.setitem(sys.modules, "nets", module)


def build(name: str = "Net", shape: tuple[int, ...] = (5,), **options) -> Network:
    extra = options.pop("extra_size", 0)
    return build_network("net", NetworkSpec(f"nets:{name}", shape, 3, extra_size=extra, options=options))


def tensors(network: Network, seed: int = 0, dtype=torch.float32) -> dict[str, Tensor]:
    params = network.initialize(np.random.default_rng(seed))
    return {name: torch.from_numpy(value).to(dtype) for name, value in params.items()}


def test_parameters_are_the_modules_under_the_networks_name_drawn_by_its_own_constructor():
    network = build(width=4)
    assert network.shapes == {
        "net.first.weight": (4, 5),
        "net.first.bias": (4,),
        "net.norm.weight": (4,),
        "net.norm.bias": (4,),
        "net.last.weight": (3, 4),
        "net.last.bias": (3,),
    }
    params, again, other = (network.initialize(np.random.default_rng(seed)) for seed in (0, 0, 1))
    assert all(np.array_equal(params[name], again[name]) for name in params)
    assert not np.array_equal(params["net.first.weight"], other["net.first.weight"])
    assert abs(params["net.first.weight"]).max() <= 1 / np.sqrt(5)


def test_neither_building_nor_initializing_touches_torchs_own_generator():
    before = torch.get_rng_state()
    build(width=5).initialize(np.random.default_rng(0))
    assert torch.equal(torch.get_rng_state(), before)


def test_constant_buffers_are_the_same_in_every_process_whatever_its_generator():
    network, inputs = build(), torch.rand(4, 5)
    params = tensors(network)
    expected = network(params, inputs)
    torch.manual_seed(7)
    fresh = type(sys.modules["nets"].Net)("Net", (Net,), {})  # as another process imports it
    sys.modules["nets"].Net = fresh
    assert torch.equal(build()(params, inputs), expected)


@pytest.mark.parametrize(("name", "shape"), [("Net", (5,)), ("Pixels", (2, 6, 6))])
def test_a_task_axis_computes_every_task_with_its_own_parameters_and_can_be_differentiated_twice(name, shape):
    network = build(name, shape)
    tasks = [tensors(network, seed, torch.float64) for seed in range(3)]
    inputs = torch.rand(3, 4, int(np.prod(shape)), dtype=torch.float64)
    stacked = {key: torch.stack([params[key] for params in tasks]).requires_grad_() for key in tasks[0]}
    found = network(stacked, inputs)
    for b, params in enumerate(tasks):
        torch.testing.assert_close(found[b], network(params, inputs[b]))
    gradients = torch.autograd.grad(found.square().sum(), list(stacked.values()), create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in gradients), list(stacked.values()))
    assert all(value.isfinite().all() for value in second)


def test_frozen_parameters_are_no_parameters_and_stay_as_the_constructor_makes_them():
    network, inputs = build("Frozen"), torch.rand(4, 5)
    assert "net.first.weight" not in network.shapes
    params, other = tensors(network), tensors(network, 1)
    assert params.keys() == network.shapes.keys()
    torch.manual_seed(7)
    assert torch.equal(build("Frozen", layers=["first"])(params, inputs), network(params, inputs))  # constructed anew
    # Runs that are stored rely on its values, which are those of seed 0.
    torch.manual_seed(0)
    module = Frozen((5,), 3)
    module.load_state_dict({name.removeprefix("net."): value for name, value in params.items()}, strict=False)
    torch.testing.assert_close(network(params, inputs), module(inputs))
    stacked = {name: torch.stack([params[name], other[name]]) for name in params}
    torch.testing.assert_close(network(stacked, inputs.expand(2, 4, 5))[1], network(other, inputs))


def test_inputs_are_scaled_and_have_the_shape_of_an_observation():
    spec = NetworkSpec("nets:Pixels", (2, 6, 6), 3, input_scale=255.0)
    network, images = build_network("net", spec), torch.randint(0, 256, (4, 2, 6, 6)).float()
    params = tensors(network)
    unscaled = build("Pixels", (2, 6, 6))(params, (images / 255).flatten(1))
    torch.testing.assert_close(network(params, images.flatten(1)), unscaled)


def test_what_is_behind_an_observation_lengthens_the_input():
    assert build(extra_size=2).shapes["net.first.weight"] == (6, 7)
    with pytest.raises(ConfigError, match=r"appends 2 values to observations of shape \(2, 6, 6\)"):
        build("Pixels", (2, 6, 6), extra_size=2)


def test_threads_do_not_see_each_others_parameters():
    network, inputs = build(), torch.rand(64, 5)
    params = [tensors(network, seed) for seed in range(8)]
    expected = [network(one, inputs) for one in params]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(20):
            for found, one in zip(pool.map(lambda one: network(one, inputs), params), expected, strict=True):
                assert torch.equal(found, one)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("With", {"layer": "Dropout"}, "draws random numbers when it is called, as dropout does"),
        ("With", {"layer": "BatchNorm1d"}, "changes its buffer norm.running_mean .*, as batch normalization does"),
        ("With", {"layer": "BatchNorm1d-static"}, "depends on the other rows"),
        ("Drifting", {}, "returns different outputs for the same inputs on a second call"),
        ("Fickle", {}, "returned .*; expected "),
        ("NoisyWhileLearning", {}, "draws random numbers when it is called"),
        ("Frozen", {"layers": ["first", "norm", "last"]}, "has no trainable parameters"),
        ("Wide", {}, r"returned \(1, 4, 3\) for inputs of shape \(4, 5\); expected \(4, 3\)"),
        ("Failing", {}, "raised RuntimeError on inputs of shape .*: shapes do not match"),
        ("Double", {}, "parameter first.weight of nets:Double is torch.float64; expected torch.float32"),
        (
            "Net",
            {"breadth": 3},
            r"nets:Net\(\(5,\), 3, breadth=3\) raised TypeError: .*breadth.*; a network's class is called with "
            r"\(input_shape, output_size\)",
        ),
        ("factory", {}, "got 'nets:factory', which is a function; expected a subclass of torch"),
        ("Nothing", {}, "policy.network: got 'nets:Nothing': .*expected module:Class"),
    ],
)
def test_what_is_no_function_of_its_parameters_and_single_inputs_is_refused(name, options, message):
    with pytest.raises(ConfigError, match=message):
        build(name, **options)


def test_a_name_that_nobody_knows_is_refused_with_those_that_are_known():
    with pytest.raises(
        ConfigError,
        match=r"got 'resnet'; expected one of mlp, cnn, .*, linear-attention; or module:Class .*metaloom.networks",
    ):
        build_network("net", NetworkSpec("resnet", (5,), 3))


def test_outputs_of_another_type_than_float32_are_refused_unless_an_earlier_version_took_them():
    assert build("Doubled")
    with float32_alone(), pytest.raises(ConfigError, match=r"Doubled returns outputs of torch.float64; expected"):
        build("Doubled")
    with float32_alone():
        assert build("Net")

"""Built-in networks: what they compute, with and without a task axis, and what they refuse."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
import yaml
from pydantic import ValidationError
from torch import Tensor, nn

from metaloom.pipeline.config.input import ConfigError
from metaloom.pipeline.nn.networks import activation, build_network, initialize_shapes
from metaloom.pipeline.nn.spec import (
    ACTIVATIONS,
    TORCH_ACTIVATIONS,
    AttentionOptions,
    ConvolutionOptions,
    NetworkSpec,
    Spaces,
    check_fits,
    convolutions,
    is_image,
    parameter_shapes,
)
from metaloom.pipeline.policies.config import PolicyConfig

IMAGES = NetworkSpec("cnn", (9, 8, 3), 4, (6,), "relu", input_scale=255.0)
SPECS = {
    "plain": NetworkSpec("mlp", (5,), 3, (7, 6)),
    "relu": NetworkSpec("mlp", (5,), 3, (7, 6), "relu"),
    "squashed": NetworkSpec("mlp", (5,), 3, (7, 6), "SiLU", "tanh"),
    "scaled": NetworkSpec("mlp", (4,), 3, (7,), "tanh", input_scale=8.0, extra_size=2),
    "residual": NetworkSpec("residual", (5,), 3, (6, 6, 6), "tanh"),
    "cnn": IMAGES,
    "cnn-tanh": replace(IMAGES, activation="tanh", output_activation="Softplus"),
    "cnn-gray": NetworkSpec("cnn", (9, 8), 4, (6,), "ELU", input_scale=255.0),
    "cnn-extra": replace(IMAGES, extra_size=2),
    "cnn-options": replace(
        IMAGES,
        input_shape=(3, 9, 8),
        options={"channels": [5], "kernel_sizes": [4], "strides": [1], "channels_first": True},
    ),
}
of_every_network = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


def drawn(spec: NetworkSpec, seed: int = 0) -> dict[str, Tensor]:
    params = build_network("net", spec).initialize(np.random.default_rng(seed))
    return {name: torch.from_numpy(value).double() for name, value in params.items()}


def inputs_of(spec: NetworkSpec, *leading: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return spec.input_scale * torch.rand(*leading, spec.input_size, generator=generator, dtype=torch.float64)


@of_every_network
def test_parameters_are_float32_of_the_shapes_it_tells_and_the_same_for_the_same_generator(spec):
    network = build_network("net", spec)
    params, again, other = (network.initialize(np.random.default_rng(seed)) for seed in (0, 0, 1))
    assert {name: value.shape for name, value in params.items()} == network.shapes == parameter_shapes("net", spec)
    assert list(params) == list(network.shapes)
    for name, value in params.items():
        assert value.dtype == np.float32
        assert np.array_equal(value, again[name])
        assert np.array_equal(value, other[name]) == name.endswith("bias")


@of_every_network
def test_a_task_axis_computes_every_task_with_its_own_parameters(spec):
    network, tasks = build_network("net", spec), [drawn(spec, seed) for seed in range(3)]
    inputs = inputs_of(spec, 3, 5)
    found = network({name: torch.stack([params[name] for params in tasks]) for name in tasks[0]}, inputs)
    assert found.shape == (3, 5, spec.output_size)
    for b, params in enumerate(tasks):
        torch.testing.assert_close(found[b], network(params, inputs[b]))


@of_every_network
def test_second_derivatives_agree_with_finite_differences(spec):
    network, params = build_network("net", replace(spec, activation="tanh")), drawn(spec)
    names, inputs = list(params), inputs_of(spec, 2)

    def output(*values: Tensor) -> Tensor:
        return network(dict(zip(names, values, strict=True)), inputs)

    leaves = [params[name].requires_grad_() for name in names]
    assert torch.autograd.gradcheck(output, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(output, leaves, fast_mode=True)


def linear(params: dict[str, Tensor], name: str) -> nn.Module:
    layer = nn.Linear(*params[f"net.{name}.kernel"].shape, dtype=torch.float64)
    layer.load_state_dict({"weight": params[f"net.{name}.kernel"].T, "bias": params[f"net.{name}.bias"]})
    return layer


def convolution(params: dict[str, Tensor], name: str, stride: int) -> nn.Module:
    kernel = params[f"net.{name}.kernel"]
    layer = nn.Conv2d(kernel.shape[1], kernel.shape[0], kernel.shape[2], stride, dtype=torch.float64)
    layer.load_state_dict({"weight": kernel, "bias": params[f"net.{name}.bias"]})
    return layer


def test_a_cnn_is_torchs_convolutions_of_the_scaled_image_with_channels_in_front():
    params = drawn(IMAGES)
    layers = [convolution(params, "conv_0", 2), nn.ReLU(), convolution(params, "conv_1", 2), nn.ReLU(), nn.Flatten()]
    expected = nn.Sequential(*layers, linear(params, "hidden_0"), nn.ReLU(), linear(params, "output"))
    inputs = inputs_of(IMAGES, 5)
    images = inputs.reshape(5, 9, 8, 3).permute(0, 3, 1, 2) / 255
    torch.testing.assert_close(build_network("net", IMAGES)(params, inputs), expected(images))


def test_channels_in_front_give_what_channels_behind_give():
    spec, params = SPECS["cnn-options"], drawn(SPECS["cnn-options"])
    behind = replace(spec, input_shape=(9, 8, 3), options=dict(spec.options) | {"channels_first": False})
    images = inputs_of(spec, 5).reshape(5, 3, 9, 8)
    found = build_network("net", spec)(params, images.reshape(5, -1))
    turned = build_network("net", behind)(params, images.permute(0, 2, 3, 1).reshape(5, -1))
    torch.testing.assert_close(found, turned)


def test_residual_layers_add_to_their_input():
    spec, params = SPECS["residual"], drawn(SPECS["residual"])
    x = inputs_of(spec, 4)
    expected = torch.tanh(linear(params, "hidden_0")(x))
    for name in ("hidden_1", "hidden_2"):
        expected = expected + torch.tanh(linear(params, name)(expected))
    torch.testing.assert_close(build_network("net", spec)(params, x), linear(params, "output")(expected))


def test_only_observations_are_scaled_not_what_is_behind_them():
    spec, params = SPECS["scaled"], drawn(SPECS["scaled"])
    x = inputs_of(spec, 4)
    scaled = torch.cat([x[:, :4] / 8, x[:, 4:]], 1)
    unscaled = build_network("net", replace(spec, input_scale=1.0))
    torch.testing.assert_close(build_network("net", spec)(params, x), unscaled(params, scaled))


def test_the_names_of_activations_are_torchs_that_map_every_number_alone_without_parameters_or_chance():
    learns_or_mixes = {"GLU", "MultiheadAttention", "PReLU", "RReLU", "Threshold"}
    over_an_axis = {"LogSoftmax", "Softmax", "Softmax2d", "Softmin"}
    assert set(TORCH_ACTIVATIONS) == set(nn.modules.activation.__all__) - learns_or_mixes - over_an_axis


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_activation_can_be_called(name):
    values = torch.linspace(-3, 3, 7)
    assert activation(name)(values.clone()).shape == values.shape


def test_tanh_of_many_tasks_on_the_cpu_is_numpys_as_in_acting():
    values = torch.linspace(-3, 3, 1000).reshape(2, 50, 10)
    assert np.array_equal(activation("tanh")(values.clone()).numpy(), np.tanh(values.numpy()))


@pytest.mark.parametrize("network", ["mlp", "residual"])
@pytest.mark.parametrize(("shape", "scale"), [((16, 16, 3), 255.0), ((16, 16, 3), 1.0), ((16, 16), 255.0)])
def test_a_network_that_would_flatten_an_image_is_refused_and_cnn_is_named(network, shape, scale):
    config = PolicyConfig(network=network, hidden_sizes=(8, 8))
    with pytest.raises(ConfigError, match=r"images of shape \(16, 16.*use policy.network=cnn"):
        config.network_spec(Spaces(shape, scale, 2, 0), 2)


@pytest.mark.parametrize("shape", [(), (5,), (2, 3, 4, 5)])
def test_a_cnn_on_what_is_no_image_is_refused(shape):
    with pytest.raises(ConfigError, match=r"expected images.* use policy.network=mlp"):
        PolicyConfig(network="cnn").network_spec(Spaces(shape, 1.0, 2, 0), 2)


@pytest.mark.parametrize("shape", [(5, 5, 3), (6, 7), (4, 84, 84), (1, 16, 3), (3, 5, 5), (7, 7, 3)])
def test_the_options_that_are_advised_fit_the_image_which_the_defaults_do_not(shape):
    spaces = Spaces(shape, 255.0, 2, 0)
    with pytest.raises(ConfigError, match="unrelated numbers") as refused:
        PolicyConfig().network_spec(spaces, 2)
    advised = re.search(r"network=cnn(?: with policy.network_options=(\{.*?\}))?, module", str(refused.value)).group(1)
    if shape == (7, 7, 3):
        assert advised is None
        PolicyConfig(network="cnn").network_spec(spaces, 2)
        with pytest.raises(ConfigError, match="use smaller or fewer ones, or the defaults"):
            PolicyConfig(network="cnn", network_options={"kernel_sizes": [8, 8]}).network_spec(spaces, 2)
        return
    with pytest.raises(ConfigError, match=r"nothing is left of an image of .* after convolution [01] of") as refused:
        PolicyConfig(network="cnn").network_spec(spaces, 2)
    assert f"such as --set 'policy.network_options={advised}'" in str(refused.value)
    PolicyConfig(network="cnn", network_options=yaml.safe_load(advised)).network_spec(spaces, 2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"network_options": {"width": 3}}, "network mlp has no options"),
        ({"network": "cnn", "network_options": {"width": 3}}, "(?s)width.*unknown key"),
        ({"network": "cnn", "network_options": {"strides": [2]}}, "differ in length"),
        ({"network": "residual", "hidden_sizes": (64, 32)}, "hidden_sizes of network residual must be equal"),
        ({"network": "gru", "hidden_sizes": ()}, r"gru has a single layer; hidden_sizes must be one size, got \(\)"),
        ({"activation": "Silu"}, "got 'Silu'; .*did you mean SiLU"),
        ({"output_activation": "PReLU"}, "expected one of identity, tanh"),
    ],
)
def test_settings_that_cannot_be_are_refused_before_there_is_an_environment(settings, message):
    with pytest.raises(ValidationError, match=message):
        PolicyConfig(**settings)


def test_a_critic_has_the_policys_network_with_layers_of_its_own_and_a_linear_end():
    config = PolicyConfig(network="residual", hidden_sizes=(8, 8), activation="SiLU", output_activation="Tanh")
    critic = config.critic((5, 5)).network_spec(Spaces((3,), 1.0, 2, 0), 1, extra_size=2)
    assert critic == NetworkSpec("residual", (3,), 1, (5, 5), "SiLU", "identity", extra_size=2)


def test_what_earlier_versions_had_is_plain_and_counts_in_no_digest():
    assert PolicyConfig().network_spec(Spaces((3,), 1.0, 2, 0), 2).is_plain
    assert PolicyConfig().network_spec(Spaces((3,), 1.0, 2, 0), 2, activation="relu").activation == "relu"
    assert PolicyConfig().decisive().keys() == {"hidden_sizes", "init_std", "min_std", "learn_std"}
    assert PolicyConfig(network="residual").decisive()["network"] == "residual"


@pytest.mark.parametrize(
    ("shape", "scale", "image"),
    [((5,), 1, False), ((5,), 255, False), ((8, 9), 1, False), ((8, 9), 255, True), ((8, 9, 3), 1, True)],
)
def test_images_have_three_axes_or_two_of_bytes(shape, scale, image):
    assert is_image(shape, scale) == image


def test_networks_have_these_defaults_and_limits():
    spec = NetworkSpec("mlp", (3,), 2)
    assert (spec.hidden_sizes, spec.input_scale, spec.extra_size) == ((64, 64), 1, 0)
    assert spec.is_plain
    for changes in (
        {"output_activation": "tanh"},
        {"activation": "GELU"},
        {"input_scale": 255.0},
        {"name": "residual"},
    ):
        assert not replace(spec, **changes).is_plain
    assert AttentionOptions().model_dump() == {"key_size": 16, "value_size": 16, "reading": "linear"}
    assert ConvolutionOptions().model_dump() == {
        "channels": (16, 32), "kernel_sizes": (3, 3), "strides": (2, 2), "channels_first": False
    }  # fmt: skip
    ones = {"channels": (1,), "kernel_sizes": (1,), "strides": (1,)}
    assert AttentionOptions(key_size=1, value_size=1).key_size == ConvolutionOptions(**ones).channels[0] == 1
    for wrong in ({"key_size": 0}, {"value_size": 0}):
        with pytest.raises(ValueError, match="greater than or equal to 1"):
            AttentionOptions(**wrong)
    for wrong in ({"channels": (), "kernel_sizes": (), "strides": ()}, *({name: (0,)} for name in ones)):
        with pytest.raises(ValueError, match=r"at least 1 item|greater than or equal to 1"):
            ConvolutionOptions(**{**ones, **wrong})


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((7, 7, 3), ""),  # 7 pixels are 3 after the first convolution, and 1 after the second
        ((6, 7, 3), "{channels: [32], kernel_sizes: [3], strides: [1]}"),
        ((3, 7, 7), "{channels_first: true}"),
        ((3, 6, 7), "{channels: [32], kernel_sizes: [3], strides: [1]}"),
        ((3, 7, 6), "{channels: [32], kernel_sizes: [3], strides: [1]}"),
        ((5, 5, 1), "{channels: [32], kernel_sizes: [3], strides: [1]}"),
        ((2, 5, 5), "{channels: [32], kernel_sizes: [2], strides: [1]}"),
        ((5, 7), "{channels: [32], kernel_sizes: [3], strides: [1]}"),
    ],
)
def test_the_smallest_image_of_the_default_convolutions_has_seven_pixels(shape, options):
    asked = f" with policy.network_options={options}," if options else ", module:Class"
    with pytest.raises(ConfigError, match=re.escape(f"use policy.network=cnn{asked}")):
        check_fits(NetworkSpec("mlp", shape, 2, input_scale=255.0))
    spec = NetworkSpec("cnn", shape, 2, input_scale=255.0)
    if options:
        with pytest.raises(ConfigError, match="nothing is left of an image"):
            check_fits(spec)
    else:
        assert convolutions(spec).features == 32


def test_kernels_of_convolutions_count_every_pixel_as_an_input():
    kernel = initialize_shapes({"k": (4, 2, 3, 3)}, np.random.default_rng(0))["k"]
    assert 0.95 / 3 < np.abs(kernel).max() <= 1 / 3  # √(6 / (6 · 9))

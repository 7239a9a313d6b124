"""PEARL's networks: how they start, and what they see."""

from dataclasses import replace

import numpy as np

from metaloom.pipeline.algorithms.pearl.learner import PEARLNetworks, initialize
from metaloom.pipeline.nn.networks import build_network
from metaloom.pipeline.nn.spec import NetworkSpec
from metaloom.pipeline.policies.config import PolicyConfig

from .conftest import SETUP, A, O, Z, build, small


def test_hidden_kernels_are_scaled_by_the_units_a_layer_hears_from():
    network = build_network("q", NetworkSpec("mlp", (400,), 2, (4, 300), "relu"))
    params = initialize(network, np.random.default_rng(0), output_limit=3e-3)
    for name, limit in (("hidden_0", 1 / 20), ("hidden_1", 1 / 2), ("output", 3e-3)):
        kernel = params[f"q.{name}.kernel"]
        assert 0.98 * limit < kernel.max() <= limit, name
        assert -limit <= kernel.min() < -0.98 * limit, name
    assert (params["q.hidden_0.bias"] == np.float32(0.1)).all()
    images = build_network("q", NetworkSpec("cnn", (8, 8, 4), 2, (5,), "relu", options={"channels": [64, 9]}))
    kernels = initialize(images, np.random.default_rng(0))["q.conv_1.kernel"]
    assert 0.98 / np.sqrt(64 * 3 * 3) < np.abs(kernels).max() <= 1 / np.sqrt(64 * 3 * 3)
    assert 0 < np.ptp(params["q.output.bias"]) <= 6e-3


def test_a_policy_begins_nearer_to_zero_than_its_critics():
    state = build(small()).initialize(run_seed=0)
    for arrays, prefix, limit in ((state.params, "policy_network", 1e-3), (state.extra, "q1", 3e-3)):
        assert limit / 2 < np.abs(arrays[f"{prefix}.output.kernel"]).max() <= limit, prefix
        assert np.abs(arrays[f"{prefix}.hidden_0.kernel"]).max() > 0.1


def test_networks_are_between_the_sizes_of_what_they_see():
    networks = PEARLNetworks.build(small(use_next_obs_in_context=True), SETUP)
    of = {name: getattr(networks, name).spec for name in ("policy", "encoder", "q", "v")}
    assert {name: (spec.input_size, spec.output_size) for name, spec in of.items()} == {
        "policy": (O + Z, 2 * A),
        "encoder": (2 * O + A + 1, 2 * Z),
        "q": (O + A + Z, 1),
        "v": (O + Z, 1),
    }
    assert {spec.activation for spec in of.values()} == {"relu"}


def test_a_residual_network_with_another_activation_learns_in_torch(draw):
    policy = PolicyConfig(network="residual", hidden_sizes=(8, 8), activation="SiLU")
    settings = small(encoder_hidden_sizes=(6, 6), critic_hidden_sizes=(6, 6))
    learner = settings.build(replace(SETUP, policy=policy))
    assert learner.kernel.name == "torch"
    state = learner.initialize(run_seed=0)
    after, metrics = learner.update(state, [draw.minibatch()] * 2, run_seed=0, iteration=0)
    assert all(np.isfinite(value) for value in metrics.values())
    for name, value in state.params.items():
        assert (after.params[name] != value).any(), name
    assert build(small()).kernel.name == "fused"

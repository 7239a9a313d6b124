from itertools import pairwise

import numpy as np
import pytest
import torch

from metaloom.pipeline.nn.spec import Spaces
from metaloom.pipeline.policies.acting import check_actor_params
from metaloom.pipeline.policies.actors.on_policy import GaussianActor
from metaloom.pipeline.policies.config import PolicyConfig
from metaloom.pipeline.policies.inference import MEAN_NETWORK, Inference, log_softmax, network_inference
from metaloom.pipeline.types import Params, TaskParams


def random_params(num_tasks: int, sizes: list[int], seed: int = 0) -> Params:
    rng = np.random.default_rng(seed)
    params: Params = {}
    layers = [f"hidden_{i}" for i in range(len(sizes) - 2)] + ["output"]
    for layer, rows, columns in zip(layers, sizes[:-1], sizes[1:], strict=True):
        params[f"mean_network.{layer}.kernel"] = rng.normal(0, 0.5, (num_tasks, rows, columns)).astype(np.float32)
        params[f"mean_network.{layer}.bias"] = rng.normal(0, 0.5, (num_tasks, columns)).astype(np.float32)
    params["log_std"] = rng.normal(0, 0.5, (num_tasks, sizes[-1])).astype(np.float32)
    return params


def inference(config: PolicyConfig, params: TaskParams, num_rows: int) -> Inference:
    layers = next(iter(params.params.values())), params.params["mean_network.output.bias"]
    A = layers[1].shape[1]
    spec = config.network_spec(Spaces(layers[0].shape[1:2], 1.0, A, 0), A)
    return network_inference(MEAN_NETWORK, spec, params, num_rows)


@pytest.mark.parametrize("num_rows", [1, 3, 4, 5, 20])
@pytest.mark.parametrize("hidden", [(), (7,), (64, 64), (3, 5, 9)])
def test_means_are_those_of_the_tanh_network(num_rows: int, hidden: tuple[int, ...]) -> None:
    params = random_params(3, [4, *hidden, 2])
    policy = inference(PolicyConfig(hidden_sizes=hidden), TaskParams(params), num_rows)
    observations = np.random.default_rng(1).normal(size=(3, num_rows, 4)).astype(np.float32)
    policy.inputs[:] = observations
    for b in range(3):
        x = observations[b].astype(np.float64)
        for i in range(len(hidden)):
            x = np.tanh(x @ params[f"mean_network.hidden_{i}.kernel"][b] + params[f"mean_network.hidden_{i}.bias"][b])
        x = x @ params["mean_network.output.kernel"][b] + params["mean_network.output.bias"][b]
        np.testing.assert_allclose(policy.outputs()[b], x, atol=1e-5)
    assert policy.outputs().dtype == np.float32


@pytest.mark.parametrize("hidden", [(), (7,), (64, 64), (100,)])
@pytest.mark.parametrize("num_rows", [1, 5, 20])
def test_the_bits_of_a_task_do_not_depend_on_the_other_tasks(hidden: tuple[int, ...], num_rows: int) -> None:
    config, params = PolicyConfig(hidden_sizes=hidden), TaskParams(random_params(13, [17, *hidden, 6]))
    observations = np.random.default_rng(1).normal(size=(13, num_rows, 17)).astype(np.float32)

    def means(start: int, stop: int) -> np.ndarray:
        policy = inference(config, params.slice(start, stop), num_rows)
        policy.inputs[:] = observations[start:stop]
        return policy.outputs().copy()

    together = means(0, 13)
    for split in ([0, 6, 13], list(range(14))):
        parts = [means(a, b) for a, b in pairwise(split)]
        assert np.array_equal(np.concatenate(parts), together)


def test_the_bits_of_a_row_do_not_depend_on_the_other_rows() -> None:
    policy = inference(PolicyConfig(), TaskParams(random_params(2, [17, 64, 64, 6])), 5)
    policy.inputs[:] = np.random.default_rng(1).normal(size=(2, 5, 17))
    before = policy.outputs().copy()
    policy.inputs[:, 1:4] = np.nan
    assert np.array_equal(policy.outputs()[:, [0, 4]], before[:, [0, 4]])


def test_shared_parameters_give_the_bits_of_copied_ones() -> None:
    one = {name: value[0] for name, value in random_params(1, [3, 8, 2]).items()}
    copied = TaskParams({name: np.stack([value] * 4) for name, value in one.items()})
    means = []
    for params in (TaskParams.broadcast(one, 4), copied):
        policy = inference(PolicyConfig(hidden_sizes=(8,)), params, 6)
        policy.inputs[:] = np.random.default_rng(0).normal(size=(4, 6, 3))
        means.append(policy.outputs().copy())
    assert np.array_equal(*means)


def test_log_std_has_the_floor_of_the_config(setup) -> None:
    params = random_params(2, [5, 8, 2])
    params["log_std"] = np.array([[-20.0, 0.5], [0.0, -3.0]], np.float32)
    config = PolicyConfig(hidden_sizes=(8,), min_std=1e-2)
    log_std = GaussianActor(setup(params, B=2, E=1, A=2, config=config)).behavior_by_task["log_std"]
    np.testing.assert_allclose(log_std, [[np.log(1e-2), 0.5], [0.0, -3.0]], rtol=1e-6)
    assert log_std.dtype == np.float32


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("mean_network.hidden_0.kernel", (2, 4, 8), r"hidden_0.kernel: got \(2, 4, 8\); expected \[B, 3, 8\]"),
        ("mean_network.output.bias", (2, 1), r"output.bias: got \(2, 1\); expected \[B, 2\]"),
        ("log_std", (2, 3), r"log_std: got \(2, 3\); expected \[B, 2\]"),
        ("log_std", None, r"log_std: got nothing; expected \[B, 2\]"),
    ],
)
def test_parameters_that_do_not_fit_the_env_are_refused(name: str, shape: tuple[int, ...] | None, message: str) -> None:
    params = random_params(2, [3, 8, 2])
    check_actor_params("policy", PolicyConfig(hidden_sizes=(8,)), params, Spaces((3,), 1.0, 2, 0))
    del params[name]
    if shape is not None:
        params[name] = np.zeros(shape, np.float32)
    with pytest.raises(ValueError, match=message):
        check_actor_params("policy", PolicyConfig(hidden_sizes=(8,)), params, Spaces((3,), 1.0, 2, 0))


def test_parameters_that_are_not_finite_are_refused_by_name_and_task() -> None:
    params = random_params(3, [3, 8, 2])
    params["mean_network.output.kernel"][2, 0, 0] = np.nan
    with pytest.raises(ValueError, match=r"mean_network.output.kernel of task 2 is not finite"):
        check_actor_params("policy", PolicyConfig(hidden_sizes=(8,)), params, Spaces((3,), 1.0, 2, 0))


def test_log_probabilities_are_finite_however_large_the_logits() -> None:
    logits = np.array([[1000, 999, -1000], [0, 0, 0], [-1e4, 1 - 1e4, -1e4]], np.float32)
    expected = torch.log_softmax(torch.from_numpy(logits), dim=-1).numpy()
    np.testing.assert_allclose(log_softmax(logits), expected, rtol=1e-6, atol=1e-6)

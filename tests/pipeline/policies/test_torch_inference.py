"""Acting with networks that are not plain: the same bits whatever other tasks, rows and threads there are."""

import subprocess
import sys
from itertools import pairwise
from threading import Event, Thread

import numpy as np
import pytest
import torch

from metaloom.pipeline.nn.networks import build_network
from metaloom.pipeline.nn.spec import NetworkSpec, Spaces
from metaloom.pipeline.policies.acting import check_actor_params
from metaloom.pipeline.policies.inference import network_inference
from metaloom.pipeline.policies.torch_inference import PaddedRows, reproducible_inference
from metaloom.pipeline.types import Params, TaskParams

B = 7
SPECS = {
    "residual": NetworkSpec("residual", (17,), 6, (64, 64), "SiLU"),
    "odd": NetworkSpec("mlp", (3,), 5, (7, 9), "GELU", "tanh"),
    "cnn": NetworkSpec("cnn", (16, 16, 3), 3, (33,), "tanh", input_scale=255.0),
}
of_every_network = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


def params_of(spec: NetworkSpec) -> Params:
    rngs = [np.random.default_rng(b) for b in range(B)]
    each = [build_network("net", spec).initialize(rng) for rng in rngs]
    return {name: np.stack([params[name] for params in each]) for name in each[0]}


def observations_of(spec: NetworkSpec, num_rows: int) -> np.ndarray:
    return (spec.input_scale * np.random.default_rng(1).random((B, num_rows, spec.input_size))).astype(np.float32)


@of_every_network
@pytest.mark.parametrize("num_rows", [1, 3, 4, 5, 20])
def test_outputs_are_those_of_the_network(spec, num_rows):
    params, observations = params_of(spec), observations_of(spec, num_rows)
    inference = network_inference("net", spec, TaskParams(params), num_rows)
    inference.inputs[:] = observations
    outputs, network = inference.outputs(), build_network("net", spec)
    assert (outputs.shape, outputs.dtype) == ((B, num_rows, spec.output_size), np.float32)
    for b in range(B):
        expected = network(
            {name: torch.tensor(value[b]) for name, value in params.items()}, torch.tensor(observations[b])
        )
        np.testing.assert_allclose(outputs[b], expected.numpy(), atol=1e-5)


@pytest.mark.parametrize(("enabled", "warn_only"), [(False, False), (True, False), (True, True)])
def test_torch_refuses_nondeterministic_operators_only_while_it_computes_actions(enabled, warn_only):
    def settings() -> tuple[bool, bool, bool]:
        deterministic = torch.are_deterministic_algorithms_enabled()
        return deterministic, torch.is_deterministic_algorithms_warn_only_enabled(), torch.is_grad_enabled()

    before, spec = settings(), SPECS["residual"]
    inference = network_inference("net", spec, TaskParams(params_of(spec)), 1)
    assert settings() == before
    torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
    try:
        inference.outputs()
        assert settings() == (enabled, warn_only, True)
        with reproducible_inference(), pytest.raises(RuntimeError, match=r"put_ .*deterministic"):
            torch.zeros(2).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))
        assert settings() == (enabled, warn_only, True)
    finally:
        torch.use_deterministic_algorithms(False)


def test_nondeterministic_operators_are_refused_until_the_last_thread_has_computed_its_actions():
    begun, goes_on = Event(), Event()

    def other():
        with reproducible_inference():
            begun.set()
            assert goes_on.wait(60)

    with reproducible_inference():
        thread = Thread(target=other)
        thread.start()
        assert begun.wait(60)
    assert torch.are_deterministic_algorithms_enabled()
    goes_on.set()
    thread.join()
    assert not torch.are_deterministic_algorithms_enabled()


@of_every_network
@pytest.mark.parametrize("num_rows", [1, 5, 20])
def test_the_bits_of_a_task_depend_on_neither_the_others_nor_threads(spec, num_rows):
    params, observations = TaskParams(params_of(spec)), observations_of(spec, num_rows)

    def outputs(start: int, stop: int) -> np.ndarray:
        inference = network_inference("net", spec, params.slice(start, stop), num_rows)
        inference.inputs[:] = observations[start:stop]
        return inference.outputs().copy()

    together = outputs(0, B)
    for split in ([0, 3, B], list(range(B + 1))):
        assert np.concatenate([outputs(a, b) for a, b in pairwise(split)]).tobytes() == together.tobytes()
    torch.set_num_threads(2)
    try:
        assert outputs(0, B).tobytes() == together.tobytes()
        with reproducible_inference():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


@of_every_network
def test_the_bits_of_a_row_do_not_depend_on_the_other_rows_nor_on_how_many_there_are(spec):
    params, observations = TaskParams(params_of(spec)), observations_of(spec, 9)

    def outputs(rows: np.ndarray) -> np.ndarray:
        inference = network_inference("net", spec, params, rows.shape[1])
        inference.inputs[:] = rows
        return inference.outputs().copy()

    expected = outputs(observations)
    ended = observations.copy()
    ended[:, 2:7] = np.nan
    assert outputs(ended)[:, [0, 1, 7, 8]].tobytes() == expected[:, [0, 1, 7, 8]].tobytes()
    assert outputs(observations[:, :5]).tobytes() == expected[:, :5].tobytes()


@pytest.mark.parametrize(("num_rows", "padded"), [(1, 4), (4, 4), (5, 8)])
def test_rows_are_padded_with_zeros_to_a_multiple_of_four(num_rows, padded):
    rows = PaddedRows({"kernel": np.ones((B, 2), np.float32)}, num_rows, 3)
    rows.inputs[:] = 1
    expected = torch.zeros(padded, 3)
    expected[:num_rows] = 1
    assert len([*rows]) == B
    assert all(torch.equal(inputs, expected) for _, inputs in rows)


@of_every_network
def test_shared_parameters_give_the_bits_of_copied_ones(spec):
    one = {name: value[0] for name, value in params_of(spec).items()}
    found = []
    for params in (
        TaskParams.broadcast(one, B),
        TaskParams({name: np.stack([value] * B) for name, value in one.items()}),
    ):
        inference = network_inference("net", spec, params, 6)
        inference.inputs[:] = observations_of(spec, 6)
        found.append(inference.outputs().copy())
    assert np.array_equal(*found)


def test_parameters_of_a_cnn_are_checked_against_its_own_shapes(config):
    spaces = Spaces((16, 16, 3), 255.0, 0, 3)
    cnn = config.model_copy(update={"network": "cnn"})
    spec = cnn.network_spec(spaces, 3)
    params = {
        name.replace("net.", "logits_network.", 1): value[None]
        for name, value in build_network("net", spec).initialize(np.random.default_rng(0)).items()
    }
    check_actor_params("policy", cnn, params, spaces)
    params["logits_network.conv_1.kernel"] = np.zeros((1, 32, 16, 5, 5), np.float32)
    with pytest.raises(ValueError, match=r"conv_1.kernel: got \(1, 32, 16, 5, 5\); expected \[B, 32, 16, 3, 3\]"):
        check_actor_params("policy", cnn, params, spaces)


@pytest.mark.parametrize(("network", "needs_torch"), [("mlp", False), ("residual", True)])
def test_only_networks_that_are_not_plain_ones_import_torch(network, needs_torch):
    code = f"""
import sys
import numpy as np
from metaloom.flows.rollouts import supervised
from metaloom.pipeline.envs.config import EnvConfig
from metaloom.pipeline.envs.registry import make_env
from metaloom.pipeline.nn.spec import Spaces, parameter_shapes
from metaloom.pipeline.policies import PolicyConfig
from metaloom.pipeline.types import TaskParams
from metaloom.stages.collect_rollouts import RolloutPosition, Sampler, play_episodes
from metaloom.pipeline.tasks.samplers import draw_tasks
env, policy = EnvConfig(name="point-2d"), PolicyConfig(network="{network}")
shapes = parameter_shapes("mean_network", policy.network_spec(Spaces((2,), 1.0, 2, 0), 2)) | {{"log_std": (2,)}}
params = TaskParams.broadcast({{name: np.zeros(shape, np.float32) for name, shape in shapes.items()}}, 2)
sampler = Sampler(env, policy, episodes_per_task=2, max_episode_steps=3)
tasks = draw_tasks(make_env(env), num_tasks=2, run_seed=1, iteration=0)
play_episodes(sampler, params, tasks, position=RolloutPosition(1, 0, 0))
assert ("torch" in sys.modules) is {needs_torch}
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from metaloom.pipeline.nn.spec import Spaces
from metaloom.pipeline.policies import PolicyConfig
from metaloom.pipeline.policies.build import GaussianPolicy

GOLDEN = Path(__file__).parents[2] / "golden"


def load(name):
    with np.load(GOLDEN / f"{name}.npz") as file:
        return {key: torch.from_numpy(value) for key, value in file.items()}


def small(**settings):
    return GaussianPolicy(Spaces((3,), 1.0, 2, 0), PolicyConfig(hidden_sizes=(8, 8), **settings))


def fresh(policy):
    return {name: torch.from_numpy(v) for name, v in policy.initialize(np.random.default_rng(0)).items()}


def test_mean_and_log_std_agree_with_the_original():
    arrays = load("policy_distribution")
    params = {name.removeprefix("theta."): value for name, value in arrays.items() if name.startswith("theta.")}
    params["log_std"] = params.pop("log_std_network.log_std_var")[0]
    mean, log_std = small().distribution(params, arrays["obs"])
    torch.testing.assert_close(mean, arrays["mean"], rtol=1e-5, atol=1e-6)
    assert torch.equal(log_std, arrays["log_std"])


def test_the_floor_of_the_original_holds_on_every_path():
    arrays, policy = load("policy_min_std"), small()
    params = {**fresh(policy), "log_std": arrays["log_std_var"][0]}
    alone = policy.distribution(params, torch.zeros(4, 3)).log_std
    per_task = {name: value.expand(2, *value.shape) for name, value in params.items()}
    batched = policy.distribution(per_task, torch.zeros(2, 4, 3)).log_std
    torch.testing.assert_close(alone, arrays["log_std_pre_update_path"])
    # The original does not clamp here; see tests/golden/README.md.
    torch.testing.assert_close(batched, arrays["log_std_pre_update_path"].expand(2, 1, 2))


def test_parameters_come_in_layer_order_with_log_std_last():
    params = small(init_std=0.5).initialize(np.random.default_rng(0))
    assert next(iter(params)) == "mean_network.hidden_0.kernel"
    assert [*params][-1] == "log_std"
    np.testing.assert_allclose(params["log_std"], np.log(0.5), rtol=1e-6)


def test_hidden_sizes_shape_the_network():
    policy = GaussianPolicy(Spaces((3,), 1.0, 2, 0), PolicyConfig(hidden_sizes=(7,)))
    params = policy.initialize(np.random.default_rng(0))
    assert params["mean_network.hidden_0.kernel"].shape == (3, 7)
    assert params["mean_network.output.kernel"].shape == (7, 2)


def test_the_same_generator_state_gives_the_same_parameters():
    a, b, c = (small().initialize(np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert all(np.array_equal(a[name], b[name]) for name in a)
    assert not np.array_equal(a["mean_network.output.kernel"], c["mean_network.output.kernel"])


def test_min_std_is_a_floor_for_the_standard_deviation():
    policy = small(min_std=0.25)
    params = {**fresh(policy), "log_std": torch.log(torch.tensor([0.1, 0.5]))}
    std = policy.distribution(params, torch.zeros(1, 3)).log_std.exp()
    torch.testing.assert_close(std, torch.tensor([[0.25, 0.5]]))


@pytest.mark.parametrize(("learn_std", "learned"), [(True, True), (False, False)])
def test_the_standard_deviation_is_learned_only_if_asked(learn_std, learned):
    policy = small(learn_std=learn_std)
    params = policy.initialize(np.random.default_rng(0))
    assert ("log_std" in policy.learned(params)) == learned
    assert set(params) - set(policy.learned(params)) <= {"log_std"}


@pytest.mark.parametrize(
    "wrong",
    [
        {"hidden_sizes": (0,)},
        {"init_std": 0},
        {"min_std": 0},
        {"min_std": 2.0},
        {"init_std": 1e-7},
    ],
)
def test_impossible_settings_are_refused(wrong):
    with pytest.raises(ValidationError):
        PolicyConfig(**wrong)

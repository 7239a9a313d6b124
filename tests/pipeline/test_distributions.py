from pathlib import Path

import numpy as np
import pytest
import torch

from metaloom.pipeline.nn.distributions import DiagGaussian, likelihood_ratio

TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}


@pytest.fixture(scope="module")
def golden():
    with np.load(Path(__file__).parents[1] / "golden" / "policy_distribution.npz") as file:
        return {name: torch.from_numpy(value) for name, value in file.items()}


@pytest.fixture(scope="module")
def pair(golden):
    return tuple(DiagGaussian(golden[f"{name}_mean"], golden[f"{name}_log_std"]) for name in "AB")


@pytest.fixture
def gaussian():
    generator = torch.Generator().manual_seed(0)
    mean, log_std = torch.randn((4, 5, 3), generator=generator), 0.3 * torch.randn((4, 1, 3), generator=generator)
    return DiagGaussian(mean.double(), log_std.double())


def reference(gaussian):
    normal = torch.distributions.Normal(gaussian.mean, gaussian.log_std.exp().expand_as(gaussian.mean))
    return torch.distributions.Independent(normal, 1)


def test_the_kl_agrees_with_the_original(golden, pair):
    a, b = pair
    torch.testing.assert_close(a.kl(b), golden["kl_A_B"], **TOLERANCE)


def test_the_likelihood_ratio_agrees_with_the_original(golden, pair):
    a, b = pair
    ratio = likelihood_ratio(b.log_prob(golden["x"]), a.log_prob(golden["x"]))
    torch.testing.assert_close(ratio, golden["ratio_B_over_A"], **TOLERANCE)


def test_log_prob_and_entropy_agree_with_the_original(golden, pair):
    a, _ = pair
    torch.testing.assert_close(a.log_prob(golden["x"]), golden["loglik_A"], **TOLERANCE)
    torch.testing.assert_close(a.entropy(), golden["entropy_A"], **TOLERANCE)


def test_log_prob_is_that_of_torch_summed_over_actions(gaussian):
    actions = gaussian.mean + 0.7
    torch.testing.assert_close(gaussian.log_prob(actions), reference(gaussian).log_prob(actions))


def test_entropy_is_that_of_torch(gaussian):
    torch.testing.assert_close(gaussian.entropy().expand(4, 5), reference(gaussian).entropy())


def test_kl_is_that_of_torch_up_to_its_epsilon(gaussian):
    other = DiagGaussian(gaussian.mean + 0.4, gaussian.log_std - 0.2)
    expected = torch.distributions.kl_divergence(reference(gaussian), reference(other))
    torch.testing.assert_close(gaussian.kl(other), expected, rtol=1e-6, atol=1e-6)


def test_kl_to_itself_is_zero_and_otherwise_positive(gaussian):
    assert gaussian.kl(gaussian).abs().max() < 1e-7
    assert (gaussian.kl(DiagGaussian(gaussian.mean + 0.1, gaussian.log_std)) > 0).all()


def test_the_divergence_of_narrow_distributions_is_bounded_by_its_epsilon():
    # With a variance of nearly nothing, 1e-4² / (2σ² + 1e-8) is one.
    narrow = [DiagGaussian(torch.tensor([mean], dtype=torch.float64), torch.tensor([-20.0])) for mean in (0.0, 1e-4)]
    assert narrow[0].kl(narrow[1]).item() == pytest.approx(1, rel=1e-6)

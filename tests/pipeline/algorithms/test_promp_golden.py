"""Agreement with the numbers of the original ProMP code; tests/golden/README.md says how they were made."""

import numpy as np
import pytest

from metaloom.pipeline.algorithms.contract import Setup
from metaloom.pipeline.algorithms.maml.meta_gradient import meta_gradient
from metaloom.pipeline.algorithms.maml.promp import adapted_kl_coeff
from metaloom.pipeline.algorithms.maml.rows import build_chunks
from metaloom.pipeline.algorithms.maml.settings import ProMP
from metaloom.pipeline.baselines import BaselineConfig
from metaloom.pipeline.estimation.config import ProcessingConfig
from metaloom.pipeline.nn.spec import Spaces
from metaloom.pipeline.policies import PolicyConfig
from metaloom.pipeline.policies.build import GaussianPolicy
from metaloom.pipeline.types import LearnerState, TaskParams

FILES = ("promp_1step_offpolicy", "promp_1step_offpolicy_clip0.1_kl2", "promp_1step_onpolicy")
POLICY = GaussianPolicy(Spaces((3,), 1.0, 2, 0), PolicyConfig(hidden_sizes=(8, 8)))


def build(settings, policy=POLICY):
    sizes = ((3,), 1.0, policy.action_size, 0, "toy", 5)
    return settings.build(Setup(*sizes, policy.config, BaselineConfig(), ProcessingConfig(), "cpu", np.negative))


@pytest.fixture(params=FILES)
def arrays(request, golden):
    return golden(request.param)


@pytest.fixture
def steps(arrays, golden_steps):
    return golden_steps(arrays)


@pytest.fixture
def learner(arrays, golden_params) -> LearnerState:
    fresh = build(algorithm(arrays)).initialize(run_seed=0)
    return LearnerState(golden_params(arrays, "theta"), fresh.optimizer, fresh.extra)


def algorithm(arrays, num_epochs: int = 5, tasks_per_chunk: int = 2) -> ProMP:
    return ProMP(
        inner_lr=float(arrays["inner_lr"]),
        inner_steps=int(arrays["num_inner_grad_steps"]),
        clip_eps=float(arrays["clip_eps"]),
        init_inner_kl_penalty=float(arrays["inner_kl_coeff"][0]),
        outer_lr=float(arrays["learning_rate"]),
        num_epochs=num_epochs,
        tasks_per_chunk=tasks_per_chunk,
    )


def flat(params) -> np.ndarray:
    return np.concatenate([value.ravel() for value in params.values()])


def test_parameter_order_is_that_of_the_original(arrays, learner):
    np.testing.assert_array_equal(flat(learner.params), arrays["theta_flat"])


def test_adapted_parameters_agree_to_1e_5(arrays, steps, learner, golden_params):
    before = TaskParams.broadcast(learner.params, 3)
    adapted = build(algorithm(arrays)).adapt(learner, before, steps[0])
    for i in range(3):
        for name, expected in golden_params(arrays, f"adapted_step1_task{i}").items():
            np.testing.assert_allclose(adapted.params[name][i], expected, rtol=1e-5, atol=1e-7, err_msg=f"{name} {i}")


@pytest.mark.parametrize("tasks_per_chunk", [1, 2, 3])
def test_loss_kls_and_gradient_agree_to_1e_5(arrays, steps, learner, tasks_per_chunk):
    promp = algorithm(arrays)
    problem = build(promp).problem(learner, steps)
    gradients, values, _ = meta_gradient(problem, learner.params, build_chunks(steps, tasks_per_chunk))
    gradient, expected = flat(gradients), arrays["grad_flat"]
    assert np.linalg.norm(gradient - expected) < 1e-5 * np.linalg.norm(expected)
    # On-policy losses and KLs are differences of nearly equal float32 numbers: zero up to rounding.
    np.testing.assert_allclose(values["loss"].mean(), arrays["loss"], rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(values["inner_kl_0"].mean(), arrays["inner_kl_per_step"][0], rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(values["outer_kl"].mean(), arrays["outer_kl"], rtol=1e-5, atol=1e-7)


def test_clip_fraction_agrees(arrays, steps, learner):
    promp = algorithm(arrays)
    _, values, _ = meta_gradient(build(promp).problem(learner, steps), learner.params, build_chunks(steps, 2))
    # The original's fraction pools the rows of all tasks; ours averages each task first.
    rows = [len(arrays[f"outer_ratio_task{i}"]) for i in range(3)]
    pooled = np.average(values["clip_fraction"], weights=rows)
    np.testing.assert_allclose(pooled, arrays["frac_outside_clip"], atol=1e-6)


@pytest.mark.parametrize("num_epochs", [1, 2, 3, 4, 5])
def test_parameters_after_adam_epochs_agree_to_1e_6(arrays, steps, learner, num_epochs):
    updated, metrics = build(algorithm(arrays, num_epochs)).update(learner, steps, run_seed=0, iteration=0)
    np.testing.assert_allclose(flat(updated.params), arrays[f"theta_flat_after_adam_epoch{num_epochs}"], atol=1e-6)
    np.testing.assert_allclose(metrics["loss_before"], arrays["loss_before_each_epoch"][0], rtol=1e-5, atol=1e-7)


def test_losses_along_the_epochs_agree(arrays, steps, learner):
    for num_epochs in range(1, 5):
        _, metrics = build(algorithm(arrays, num_epochs)).update(learner, steps, run_seed=0, iteration=0)
        expected = arrays["loss_before_each_epoch"][num_epochs]
        np.testing.assert_allclose(metrics["loss_after"], expected, rtol=1e-5, atol=1e-6)


def test_loss_and_kls_after_five_epochs_agree(arrays, steps, learner):
    _, metrics = build(algorithm(arrays)).update(learner, steps, run_seed=0, iteration=0)
    np.testing.assert_allclose(metrics["loss_after"], arrays["loss_after"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(metrics["inner_kl"], arrays["inner_kl_after"].mean(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(metrics["outer_kl"], arrays["outer_kl_after"], rtol=1e-5, atol=1e-6)


def test_adaptive_kl_rule_agrees(golden):
    for kl, expected in golden("policy_distribution")["adapt_kl_coeff_table"]:
        assert adapted_kl_coeff(1.0, kl, target=0.01) == expected

"""MAML-TRPO, E-MAML and MAML-VPG against the original ProMP code; tests/golden/README.md says how they were made."""

import numpy as np
import pytest
import torch

from metaloom.pipeline.algorithms.contract import Setup
from metaloom.pipeline.algorithms.maml import policy_gradient
from metaloom.pipeline.algorithms.maml.meta_gradient import meta_gradient, meta_objective
from metaloom.pipeline.algorithms.maml.rows import build_chunks
from metaloom.pipeline.algorithms.maml.settings import EMAML, MAMLTRPO, MAMLVPG
from metaloom.pipeline.algorithms.maml.trpo import (
    MetaPoint,
    bounded_kl,
    difference_product,
    gauss_newton_product,
)
from metaloom.pipeline.baselines import BaselineConfig
from metaloom.pipeline.estimation.config import ProcessingConfig
from metaloom.pipeline.kernels.gauss_newton import fused_gauss_newton_product
from metaloom.pipeline.nn.flat_networks import FlatParams
from metaloom.pipeline.nn.spec import Spaces
from metaloom.pipeline.policies import PolicyConfig
from metaloom.pipeline.policies.build import GaussianPolicy
from metaloom.pipeline.types import LearnerState, TaskParams

TRUST_REGION = ("trpo_maml_loglik_onpolicy", "trpo_maml_ratio_onpolicy", "trpo_emaml_loglik_onpolicy")
VANILLA = ("vpg_maml_loglik_plain", "vpg_maml_loglik_exploration", "vpg_maml_ratio_plain")
POLICY = GaussianPolicy(Spaces((3,), 1.0, 2, 0), PolicyConfig(hidden_sizes=(8, 8)))


def build(settings, policy=POLICY):
    sizes = ((3,), 1.0, policy.action_size, 0, "toy", 5)
    return settings.build(Setup(*sizes, policy.config, BaselineConfig(), ProcessingConfig(), "cpu", np.negative))


def settings_of(arrays, **settings):
    """The algorithm of a golden file."""
    explores, trust_region = bool(arrays["exploration"]), "step_size" in arrays
    algorithm = (EMAML if explores else MAMLTRPO) if trust_region else MAMLVPG
    own = {"cg_damping": 0.0} if trust_region else {"outer_lr": float(arrays["learning_rate"])}
    return algorithm(
        inner_lr=float(arrays["inner_lr"]),
        inner_loss=str(arrays["inner_type"]),
        exploration=explores,
        **(own | settings),
    )


@pytest.fixture
def with_credit(monkeypatch):
    """The credit for exploration that a golden file states instead of rewards."""

    def stated(arrays):
        credit = np.array([arrays[f"step1_task{i}_adj_avg_rewards"].mean(dtype=np.float64) for i in range(3)])
        monkeypatch.setattr(policy_gradient, "exploration_credit", lambda steps: credit)
        return arrays

    return stated


@pytest.fixture(params=[*TRUST_REGION, *VANILLA])
def arrays(request, golden, with_credit):
    return with_credit(golden(request.param))


@pytest.fixture(params=TRUST_REGION)
def trpo_arrays(request, golden, with_credit):
    return with_credit(golden(request.param))


def state_of(algorithm, arrays, golden_params):
    fresh = build(algorithm).initialize(run_seed=0)
    return LearnerState(golden_params(arrays, "theta"), fresh.optimizer, fresh.extra)


def flat(params):
    return np.concatenate([value.ravel() for value in params.values()])


def in_float64(params):
    return {name: value.astype(np.float64) for name, value in params.items()}


def relative(found, expected):
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


def test_adapted_parameters_agree_to_1e_5(arrays, golden_steps, golden_params):
    algorithm = settings_of(arrays)
    learner = state_of(algorithm, arrays, golden_params)
    adapted = build(algorithm).adapt(learner, TaskParams.broadcast(learner.params, 3), golden_steps(arrays)[0])
    for i in range(3):
        for name, expected in golden_params(arrays, f"adapted_step1_task{i}").items():
            np.testing.assert_allclose(adapted.params[name][i], expected, rtol=1e-5, atol=1e-7, err_msg=name)


@pytest.mark.parametrize("tasks_per_chunk", [1, 2, 3])
def test_loss_and_gradient_agree_to_1e_6(arrays, golden_steps, golden_params, tasks_per_chunk):
    algorithm, steps = settings_of(arrays), golden_steps(arrays)
    learner = state_of(algorithm, arrays, golden_params)
    chunks = build_chunks(steps, tasks_per_chunk, dtype=torch.float64)
    problem = build(algorithm).problem(learner, steps)
    gradients, values, _ = meta_gradient(problem, in_float64(learner.params), chunks)
    assert values["loss"].mean() == pytest.approx(float(arrays["loss"]), rel=1e-6, abs=2e-7)
    assert relative(flat(gradients), arrays["grad_flat"]) < 1e-6


@pytest.mark.parametrize("name", VANILLA)
def test_parameters_and_loss_after_an_adam_step_agree(name, golden, with_credit, golden_steps, golden_params):
    arrays = with_credit(golden(name))
    algorithm = settings_of(arrays)
    learner = state_of(algorithm, arrays, golden_params)
    updated, metrics = build(algorithm).update(learner, golden_steps(arrays), run_seed=0, iteration=0)
    np.testing.assert_allclose(flat(updated.params), arrays["theta_flat_after_adam_epoch1"], atol=1e-6)
    assert metrics["loss_after"] == pytest.approx(float(arrays["loss_after"]), rel=1e-5)


def test_constraint_and_its_gradient_agree(trpo_arrays, golden_steps, golden_params):
    algorithm, steps = settings_of(trpo_arrays), golden_steps(trpo_arrays)
    learner = state_of(algorithm, trpo_arrays, golden_params)
    values = meta_objective(build(algorithm).problem(learner, steps), learner.params, build_chunks(steps, 2))
    # On-policy the KL and its gradient are zero but for float32's rounding.
    np.testing.assert_allclose(values["outer_kl"].mean(), trpo_arrays["constraint"], atol=2e-7)


@pytest.mark.parametrize("product_of", [gauss_newton_product, fused_gauss_newton_product])
def test_the_gauss_newton_matrix_is_the_constraint_s_hessian_to_1e_6(
    trpo_arrays, golden_steps, golden_params, product_of
):
    algorithm, steps = settings_of(trpo_arrays), golden_steps(trpo_arrays)
    learner = state_of(algorithm, trpo_arrays, golden_params)
    params, chunks = in_float64(learner.params), build_chunks(steps, 2, dtype=torch.float64)
    problem = build(algorithm).problem(learner, steps)
    product = product_of(MetaPoint(problem, params, FlatParams(params), chunks))
    hessian = np.stack([product(column) for column in np.eye(124)], axis=1)
    np.testing.assert_allclose(hessian, hessian.T, atol=1e-12)
    assert np.linalg.eigvalsh(hessian).min() > -1e-12
    assert relative(hessian, trpo_arrays["constraint_hessian_exact"]) < 1e-6
    assert relative(product(trpo_arrays["hvp_vec"].astype(np.float64)), trpo_arrays["hvp_exact"]) < 1e-6


@pytest.mark.parametrize("hvp", ["gauss_newton", "hessian", "finite_difference"])
def test_the_step_is_as_good_as_the_original_s(trpo_arrays, golden_steps, golden_params, hvp):
    # Its direction is not comparable: the original's float32 products and undamped conjugate gradient lose it.
    algorithm = settings_of(trpo_arrays, hvp=hvp)
    learner = state_of(algorithm, trpo_arrays, golden_params)
    _, metrics = build(algorithm).update(learner, golden_steps(trpo_arrays), run_seed=0, iteration=0)
    assert metrics["line_search_trials"] == trpo_arrays["backtracks_used"] + 1
    assert metrics["step_accepted"] == 1
    assert 0 < metrics["outer_kl"] <= trpo_arrays["step_size"]
    fall, expected = (
        trpo_arrays["loss"] - after for after in (metrics["loss_after"], trpo_arrays["loss_after_exact_hvp"])
    )
    assert fall == pytest.approx(float(expected), rel=0.1)


def test_unscaled_float32_differences_are_as_rough_as_the_original_s(trpo_arrays, golden_steps, golden_params):
    algorithm, steps = settings_of(trpo_arrays), golden_steps(trpo_arrays)
    learner = state_of(algorithm, trpo_arrays, golden_params)
    problem, flat_params = build(algorithm).problem(learner, steps), FlatParams(learner.params)
    errors = []
    for dtype, scaled in ((torch.float32, False), (torch.float64, True)):
        chunks = build_chunks(steps, 2, dtype=dtype)
        product = difference_product(MetaPoint(problem, learner.params, flat_params, chunks), bounded_kl, scaled=scaled)
        errors.append(relative(product(trpo_arrays["hvp_vec"].astype(np.float64)), trpo_arrays["hvp_exact"]))
    assert 1e-5 < errors[0] < 1e-2
    assert errors[1] < 1e-6

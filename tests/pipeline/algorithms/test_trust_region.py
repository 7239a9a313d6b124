"""The trust-region update: its curvature, its line search, its options."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from metaloom.pipeline.algorithms.contract import Kernel, Setup
from metaloom.pipeline.algorithms.maml import trpo
from metaloom.pipeline.algorithms.maml.meta_gradient import MetaProblem, meta_objective
from metaloom.pipeline.algorithms.maml.rows import Chunk, build_chunks
from metaloom.pipeline.algorithms.maml.settings import EMAML, MAMLTRPO
from metaloom.pipeline.algorithms.maml.trpo import (
    MetaPoint,
    bounded_kl,
    difference_product,
    gauss_newton_product,
    hessian_product,
    share_of_rows,
)
from metaloom.pipeline.baselines import BaselineConfig
from metaloom.pipeline.config.input import ConfigError
from metaloom.pipeline.estimation.config import ProcessingConfig
from metaloom.pipeline.kernels import gauss_newton
from metaloom.pipeline.kernels.gauss_newton import fused_gauss_newton_product
from metaloom.pipeline.nn.flat_networks import FlatParams
from metaloom.pipeline.nn.spec import Spaces
from metaloom.pipeline.policies import PolicyConfig
from metaloom.pipeline.policies.build import GaussianPolicy
from metaloom.pipeline.types import LearnerState

POLICY = GaussianPolicy(Spaces((3,), 1.0, 2, 0), PolicyConfig(hidden_sizes=(4, 5)))


def build(settings, policy=POLICY):
    sizes = ((3,), 1.0, policy.action_size, 0, "toy", 5)
    return settings.build(Setup(*sizes, policy.config, BaselineConfig(), ProcessingConfig(), "cpu", np.negative))


INNER_LOSSES = ("log_likelihood", "likelihood_ratio")


def optimize(algorithm, learner, steps, *, policy=POLICY, **keywords):
    return build(algorithm, policy).update(learner, steps, **{"run_seed": 0, "iteration": 0, **keywords})


@pytest.fixture
def sampled(on_policy_steps):
    """An algorithm's first learner, and samples that it collected."""

    def sample(algorithm, policy=POLICY, **sizes):
        learner = build(algorithm, policy)
        state = learner.initialize(run_seed=1)
        return state, on_policy_steps(learner, state, **sizes)

    return sample


def distance(a, b):
    return max(abs(a.params[name] - b.params[name]).max() for name in a.params)


def acted_in_float64(algorithm, params, chunks):
    """The chunks as if the re-adapted policy had acted in the last round, to the last digit of float64."""

    def recorded(current, chunk):
        mean, log_std = (value.detach().clone() for value in current[-1])
        behavior = type(current[-1])(mean, log_std)
        last = dataclasses.replace(chunk.rounds[-1], behavior=behavior)
        acted.append(dataclasses.replace(chunk, rounds=[*chunk.rounds[:-1], last]))
        return {"loss": chunk.rounds[-1].weights.sum(-1)}

    acted = []
    problem = build(algorithm).problem(LearnerState(params), [])
    meta_objective(dataclasses.replace(problem, objective=recorded), params, chunks)
    return problem, acted


@pytest.mark.parametrize("inner_steps", [0, 1, 2])
@pytest.mark.parametrize("inner_loss", INNER_LOSSES)
def test_where_the_policies_acted_all_products_are_those_of_the_constraint_s_hessian(sampled, inner_steps, inner_loss):
    algorithm = MAMLTRPO(inner_steps=inner_steps, inner_loss=inner_loss, inner_lr=0.2)
    learner, steps = sampled(algorithm)
    params = {name: value.astype(np.float64) for name, value in learner.params.items()}
    problem, chunks = acted_in_float64(algorithm, params, build_chunks(steps, 2, dtype=torch.float64))
    flat = FlatParams(params)
    fused = fused_gauss_newton_product(MetaPoint(problem, params, flat, chunks))
    by_torch = gauss_newton_product(MetaPoint(problem, params, flat, chunks))
    hessian = hessian_product(MetaPoint(problem, params, flat, chunks), bounded_kl)
    numerical = difference_product(MetaPoint(problem, params, flat, chunks), bounded_kl, scaled=True)
    for seed in range(3):
        v = np.random.default_rng(seed).standard_normal(flat.pack(params).size)
        expected = numerical(v)
        for product in (fused, by_torch, hessian):
            assert np.linalg.norm(product(v) - expected) < 1e-6 * np.linalg.norm(expected)


@pytest.mark.parametrize(("scaled", "step"), [(True, 1e-5 / 5), (False, 1e-5)])
def test_the_step_of_finite_differences_is_the_documented_one(monkeypatch, scaled, step):
    # At 0, central differences of the gradient x³ are step² v³.
    monkeypatch.setattr(trpo, "meta_gradient", lambda problem, params, chunks, parallel: ({"x": params["x"] ** 3},))
    params = {"x": np.zeros(2)}
    rows = SimpleNamespace(weights=torch.zeros(1, dtype=torch.float64))
    chunk, problem = Chunk(0, [rows]), MetaProblem(None, None, 0.1, False, None)
    product = difference_product(MetaPoint(problem, params, FlatParams(params), [chunk]), None, scaled=scaled)
    np.testing.assert_allclose(product(np.array([3.0, 4.0])), step**2 * np.array([27.0, 64.0]), rtol=1e-9)


@pytest.mark.parametrize(("activation", "hidden_sizes"), [("tanh", (4, 5)), ("relu", (4, 5)), ("tanh", ())])
@pytest.mark.parametrize("settings", [{}, {"inner_steps": 2, "inner_loss": "likelihood_ratio"}, {"first_order": True}])
def test_fused_products_are_those_of_the_definition_on_and_off_policy(random_steps, settings, activation, hidden_sizes):
    algorithm = MAMLTRPO(inner_lr=0.3, **settings)
    config = PolicyConfig(hidden_sizes=hidden_sizes, activation=activation)
    learner = build(algorithm, GaussianPolicy(Spaces((3,), 1.0, 2, 0), config))
    assert learner.kernel == Kernel("fused", f"plain {activation} network on the CPU")
    state, steps = learner.initialize(run_seed=1), random_steps(algorithm.inner_steps + 1, B=5)
    params = {name: value.astype(np.float64) for name, value in state.params.items()}
    problem, chunks = learner.problem(state, steps), build_chunks(steps, 2, dtype=torch.float64)
    flat = FlatParams(params)
    at = MetaPoint(problem, params, flat, chunks)
    products = [of(at) for of in (fused_gauss_newton_product, gauss_newton_product)]
    for seed in range(3):
        v = np.random.default_rng(seed).standard_normal(flat.pack(params).size)
        fused, by_torch = (product(v) for product in products)
        assert np.linalg.norm(fused - by_torch) < 1e-10 * np.linalg.norm(by_torch)


def test_off_policy_the_gauss_newton_matrix_is_positive_and_another_one_than_the_hessian(random_steps):
    algorithm = MAMLTRPO(inner_lr=0.3)
    learner, steps = build(algorithm), random_steps(2)
    state = learner.initialize(run_seed=1)
    params = {name: value.astype(np.float64) for name, value in state.params.items()}
    problem, chunks = learner.problem(state, steps), build_chunks(steps, 3, dtype=torch.float64)
    flat = FlatParams(params)
    columns = np.eye(flat.pack(params).size)
    newton, hessian = (
        np.stack([product(column) for column in columns], axis=1)
        for product in (
            gauss_newton_product(MetaPoint(problem, params, flat, chunks)),
            hessian_product(MetaPoint(problem, params, flat, chunks), bounded_kl),
        )
    )
    assert np.linalg.eigvalsh(newton).min() > -1e-12
    assert np.linalg.eigvalsh(hessian).min() < -1e-3
    assert np.linalg.norm(newton - hessian) > 0.01 * np.linalg.norm(hessian)


@pytest.mark.parametrize("algorithm", [MAMLTRPO, EMAML])
def test_fused_updates_are_those_of_the_definition(sampled, algorithm):
    # The metric of so few rows is singular; without damping, conjugate gradient would solve for rounding errors.
    algorithm = algorithm(inner_steps=2, cg_damping=0.1, cg_iterations=5)
    state, steps = sampled(algorithm)
    fused, by_torch = (
        optimize(algorithm.model_copy(update={"kernel": kernel}), state, steps)[0] for kernel in ("fused", "torch")
    )
    assert distance(state, fused) > 1e-3
    assert distance(fused, by_torch) < 1e-5


@pytest.mark.parametrize(
    ("settings", "policy", "reason"),
    [
        ({"hvp": "hessian"}, {}, "hvp is hessian"),
        ({}, {"activation": "SiLU"}, "network is an mlp of SiLU"),
        ({}, {"network": "residual"}, "network is residual"),
    ],
)
def test_what_the_fused_kernel_does_not_know_is_computed_by_torch_or_refused(sampled, settings, policy, reason):
    policy = GaussianPolicy(Spaces((3,), 1.0, 2, 0), PolicyConfig(hidden_sizes=(4, 4), **policy))
    assert build(MAMLTRPO(**settings), policy).kernel == Kernel("torch", reason)
    state, steps = sampled(MAMLTRPO(**settings), policy)
    assert optimize(MAMLTRPO(**settings), state, steps, policy=policy)[1]["step_accepted"] == 1
    with pytest.raises(ConfigError, match=reason):
        build(MAMLTRPO(kernel="fused", **settings), policy)


@pytest.mark.parametrize("kl_order", ["old_new", "new_old"])
def test_both_orders_of_the_kl_have_the_same_hessian_where_the_policies_agree(sampled, kl_order):
    algorithm = MAMLTRPO(kl_order=kl_order)
    learner, steps = sampled(algorithm)
    params = {name: value.astype(np.float64) for name, value in learner.params.items()}
    problem, chunks = acted_in_float64(algorithm, params, build_chunks(steps, 2, dtype=torch.float64))
    flat = FlatParams(params)
    v = np.random.default_rng(0).standard_normal(flat.pack(params).size)
    at, constraint = MetaPoint(problem, params, flat, chunks), partial(bounded_kl, new_old=kl_order == "new_old")
    exact = gauss_newton_product(at)(v)
    numerical = difference_product(at, constraint, scaled=True)(v)
    np.testing.assert_allclose(exact, numerical, atol=1e-6 * np.linalg.norm(exact))


def test_first_order_products_leave_the_adaptation_out(sampled):
    algorithm = MAMLTRPO(first_order=True, inner_lr=0.3)
    learner, steps = sampled(algorithm)
    params = {name: value.astype(np.float64) for name, value in learner.params.items()}
    chunks = build_chunks(steps, 3, dtype=torch.float64)
    flat = FlatParams(params)
    v = np.random.default_rng(0).standard_normal(flat.pack(params).size)
    first, second = (
        gauss_newton_product(MetaPoint(build(a).problem(learner, steps), params, flat, chunks))(v)
        for a in (algorithm, MAMLTRPO(inner_lr=0.3))
    )
    fisher = gauss_newton.ChunkCurvature(build(algorithm).problem(learner, steps), params, list(params), chunks[0])
    direct = flat.pack(fisher.product(flat.views(v))) / 3
    np.testing.assert_allclose(first, direct)
    assert np.linalg.norm(first - second) > 1e-2 * np.linalg.norm(first)


def test_products_have_the_same_bits_when_little_may_be_kept(sampled, monkeypatch):
    algorithm = MAMLTRPO(tasks_per_chunk=1)
    learner, steps = sampled(algorithm)
    kept, _ = optimize(algorithm, learner, steps)
    size = gauss_newton.ChunkCurvature.num_bytes(POLICY, build_chunks(steps, 1)[0])
    for room in (0, size):
        monkeypatch.setattr(gauss_newton, "MAX_KEPT_BYTES", room)
        again, _ = optimize(algorithm, learner, steps)
        assert distance(kept, again) == 0


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "settings", [{}, {"inner_loss": "likelihood_ratio"}, {"inner_steps": 2}, {"first_order": True}]
)
def test_a_step_lowers_the_loss_within_the_bound_or_changes_nothing(sampled, settings, seed):
    algorithm = MAMLTRPO(**settings)
    learner, steps = sampled(algorithm, seed=seed)
    updated, metrics = optimize(algorithm, learner, steps)
    if metrics["step_accepted"]:
        assert metrics["loss_after"] < metrics["loss_before"]
        assert metrics["outer_kl"] <= algorithm.max_kl
        assert distance(learner, updated) > 1e-6
    else:
        assert distance(learner, updated) == 0


def test_most_steps_are_accepted(sampled):
    accepted = []
    for seed in range(8):
        learner, steps = sampled(MAMLTRPO(), seed=seed)
        accepted.append(optimize(MAMLTRPO(), learner, steps)[1]["step_accepted"])
    assert sum(accepted) >= 6


def test_a_rejected_step_leaves_the_same_arrays(sampled):
    # The quadratic model of one conjugate-gradient step overshoots a bound this large, and one trial is all there is.
    algorithm = MAMLTRPO(max_kl=50.0, line_search_trials=1)
    learner, steps = sampled(algorithm)
    updated, metrics = optimize(algorithm, learner, steps)
    assert metrics["step_accepted"] == 0
    assert metrics["line_search_trials"] == 1
    assert metrics["loss_after"] == metrics["loss_before"]
    assert metrics["outer_kl"] == metrics["outer_kl_before"]
    assert all(updated.params[name] is learner.params[name] for name in learner.params)


def test_a_violation_is_accepted_where_that_is_asked_for(sampled):
    state, steps = sampled(MAMLTRPO())
    strict, lax = (MAMLTRPO(max_kl=50.0, line_search_trials=3, accept_violation=a) for a in (False, True))
    assert optimize(strict, state, steps)[1]["step_accepted"] == 0
    updated, metrics = optimize(lax, state, steps)
    assert (metrics["step_accepted"], metrics["line_search_trials"]) == (1, 3)
    assert metrics["loss_after"] >= metrics["loss_before"] or metrics["outer_kl"] > 50
    assert distance(updated, state) > 1e-3


@pytest.mark.parametrize("accept_violation", [False, True])
def test_trials_that_overflow_are_rejected(sampled, accept_violation):
    algorithm = MAMLTRPO(max_kl=1e30, accept_violation=accept_violation)
    learner, steps = sampled(algorithm)
    updated, metrics = optimize(algorithm, learner, steps)
    assert (metrics["step_accepted"], metrics["line_search_trials"]) == (0, 15)
    assert all(updated.params[name] is learner.params[name] for name in learner.params)


def test_without_advantages_there_is_no_step(sampled):
    learner, steps = sampled(MAMLTRPO(), advantage_scale=0.0)
    updated, metrics = optimize(MAMLTRPO(), learner, steps)
    assert (metrics["step_accepted"], metrics["line_search_trials"], metrics["cg_iterations"]) == (0, 0, 0)
    assert distance(learner, updated) == 0


@pytest.mark.parametrize("hvp", ["gauss_newton", "hessian", "finite_difference"])
def test_bits_do_not_depend_on_threads(sampled, hvp):
    algorithm = EMAML(tasks_per_chunk=1, inner_steps=2, hvp=hvp, hvp_subsample=0.5)
    learner, steps = sampled(algorithm, B=5)
    serial, metrics = optimize(algorithm, learner, steps)
    with ThreadPoolExecutor(3) as pool:
        threaded, again = optimize(algorithm, learner, steps, parallel=pool.map)
    assert again == metrics
    assert distance(serial, threaded) == 0
    assert metrics["step_accepted"] == 1


def test_chunk_size_does_not_change_the_result(sampled):
    updates = []
    for tasks_per_chunk in (1, 2, 5):
        algorithm = MAMLTRPO(tasks_per_chunk=tasks_per_chunk, cg_iterations=4)
        learner, steps = sampled(algorithm, B=5)
        updates.append(optimize(algorithm, learner, steps)[0])
    assert distance(learner, updates[0]) > 1e-3
    for other in updates[1:]:
        assert distance(updates[0], other) < 1e-4


def test_a_fixed_standard_deviation_stays(sampled):
    policy = GaussianPolicy(Spaces((3,), 1.0, 2, 0), PolicyConfig(hidden_sizes=(4,), learn_std=False))
    learner, steps = sampled(MAMLTRPO(), policy)
    updated, metrics = optimize(MAMLTRPO(), learner, steps, policy=policy)
    assert metrics["step_accepted"] == 1
    np.testing.assert_array_equal(updated.params["log_std"], learner.params["log_std"])


def test_the_floor_of_the_standard_deviation_has_no_curvature(sampled):
    policy = GaussianPolicy(Spaces((3,), 1.0, 2, 0), PolicyConfig(hidden_sizes=(4,), min_std=1.0, init_std=1.0))
    learner, steps = sampled(MAMLTRPO(), policy)
    params = {**learner.params, "log_std": learner.params["log_std"] - 1}
    flat = FlatParams({"log_std": params["log_std"]})
    problem, everything = build(MAMLTRPO(), policy).problem(learner, steps), FlatParams(params)
    v = np.zeros(everything.pack(params).size)
    v[-2:] = 1
    for product_of in (gauss_newton_product, fused_gauss_newton_product):
        product = product_of(MetaPoint(problem, params, everything, build_chunks(steps, 3)))
        assert flat.pack({"log_std": product(v)[-2:]}).tolist() == [0, 0]


def test_a_plain_trust_region_step_needs_no_adaptation(sampled):
    algorithm = MAMLTRPO(inner_steps=0)
    learner, steps = sampled(algorithm)
    _, metrics = optimize(algorithm, learner, steps)
    assert metrics["step_accepted"] == 1
    assert "inner_kl" not in metrics


def test_learner_state_keeps_names_shapes_and_dtypes(sampled):
    learner, steps = sampled(EMAML())
    updated, _ = optimize(EMAML(), learner, steps)
    assert learner.optimizer == updated.optimizer == {}
    for group in ("params", "extra"):
        old, new = getattr(learner, group), getattr(updated, group)
        assert {k: (v.shape, v.dtype) for k, v in new.items()} == {k: (v.shape, v.dtype) for k, v in old.items()}


@pytest.mark.parametrize(
    ("changed", "base"),
    [
        ({"inner_lr": 0.101}, {}),
        ({"inner_loss": "likelihood_ratio"}, {}),
        ({"first_order": True}, {}),
        ({"exploration": True}, {}),
        ({"e_maml_scale": "sum"}, {"exploration": True}),
        ({"exploration_rounds": "first"}, {"exploration": True, "inner_steps": 2}),
        ({"max_kl": 0.001}, {}),
        ({"cg_iterations": 2}, {}),
        ({"cg_tolerance": 0.1}, {}),
        ({"cg_damping": 1.0}, {}),
        ({"hvp": "finite_difference"}, {}),
        ({"hvp": "hessian"}, {}),
        ({"hvp": "fd_unscaled"}, {}),
        ({"hvp_subsample": 0.4}, {}),
        ({"backtrack_ratio": 0.3}, {"max_kl": 5.0}),
    ],
    ids=lambda settings: ", ".join(f"{name}={value}" for name, value in settings.items()),
)
def test_every_option_changes_the_learner(sampled, changed, base):
    inner_steps = base.get("inner_steps", 1)
    learner, steps = sampled(MAMLTRPO(inner_steps=inner_steps), seed=3)
    plain, metrics = optimize(MAMLTRPO(**base), learner, steps)
    other, other_metrics = optimize(MAMLTRPO(**base, **changed), learner, steps)
    assert metrics["step_accepted"] == other_metrics["step_accepted"] == 1
    assert distance(plain, other) > 1e-8


def test_the_number_of_trials_bounds_the_search(sampled):
    learner, steps = sampled(MAMLTRPO(), seed=3)
    few, many = (optimize(MAMLTRPO(max_kl=50.0, line_search_trials=n), learner, steps)[1] for n in (2, 60))
    assert (few["step_accepted"], few["line_search_trials"]) == (0, 2)
    assert many["step_accepted"] == 1
    assert many["line_search_trials"] > 2


def test_the_order_of_the_kl_decides_which_one_is_bounded(sampled):
    learner, steps = sampled(MAMLTRPO())
    found = {}
    for kl_order in ("old_new", "new_old"):
        algorithm = MAMLTRPO(kl_order=kl_order, cg_iterations=3)
        moved = {name: value + 0.1 for name, value in learner.params.items()}
        problem = build(algorithm).problem(learner, steps)
        found[kl_order] = meta_objective(problem, moved, build_chunks(steps, 2))["outer_kl"].mean()
    assert abs(found["old_new"] - found["new_old"]) > 1e-3


def test_subsampled_products_use_the_share_of_every_task_s_real_rows():
    mask = (np.random.default_rng(0).random((4, 40)) < 0.6).astype(np.float32)
    rows = share_of_rows(mask, 0.3, np.random.default_rng(1))
    for b in range(4):
        real = int(mask[b].sum())
        chosen = rows[b]
        assert len(set(chosen)) == len(chosen)
        assert mask[b, chosen].sum() == np.ceil(np.arange(real + 1) * 0.3)[-1]


def test_subsamples_are_drawn_from_run_seed_and_iteration(sampled):
    algorithm = MAMLTRPO(hvp_subsample=0.3)
    learner, steps = sampled(algorithm)
    first, again, later = (optimize(algorithm, learner, steps, iteration=i)[0] for i in (0, 0, 1))
    assert distance(first, again) == 0
    assert distance(first, later) > 1e-6


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"trainable_inner_lr": True}, "which do not include step sizes"),
        ({"first_order": True, "hvp": "finite_difference"}, "not symmetric"),
        ({"inner_loss": "dice"}, "use the algorithms dice-maml or vpg-dice"),
        ({"exploration": True, "inner_steps": 0}, "no rollout batch comes before adaptation"),
        ({"e_maml_scale": "sum"}, "requires exploration, which is off"),
        ({"exploration_rounds": "first"}, "requires exploration, which is off"),
        ({"max_kl": 0}, "greater than 0"),
        ({"backtrack_ratio": 1}, "less than 1"),
        ({"hvp_subsample": 0}, "greater than 0"),
        ({"cg_damping": -1}, "greater than or equal to 0"),
    ],
)
def test_impossible_and_contradictory_settings_are_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        MAMLTRPO(**settings)


def test_the_old_name_of_the_gauss_newton_matrix_stays_and_digests_keep_it():
    old = MAMLTRPO.model_validate({"hvp": "exact"})
    assert old == MAMLTRPO()
    assert old.decisive()["hvp"] == MAMLTRPO().decisive()["hvp"] == "exact"
    assert MAMLTRPO(hvp="hessian").decisive()["hvp"] == "hessian"
    assert not {"accept_violation", "kernel"} & old.decisive().keys()


def test_e_maml_without_exploration_is_refused():
    with pytest.raises(ValidationError, match=r"use algorithm\.name=maml-trpo"):
        EMAML(exploration=False)


def test_e_maml_is_maml_trpo_with_exploration(sampled):
    learner, steps = sampled(EMAML())
    assert distance(optimize(EMAML(), learner, steps)[0], optimize(MAMLTRPO(exploration=True), learner, steps)[0]) == 0

"""The meta-gradient against finite differences and identities, on a tiny network in float64."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from metaloom.pipeline.algorithms.contract import NumericalError, Setup
from metaloom.pipeline.algorithms.maml.learner import step_size_logs
from metaloom.pipeline.algorithms.maml.meta_gradient import (
    LOG_INNER_LR,
    likelihood_ratio_loss,
    meta_gradient,
    meta_objective,
)
from metaloom.pipeline.algorithms.maml.promp import promp_objective
from metaloom.pipeline.algorithms.maml.rows import Chunk, build_chunks, task_rows
from metaloom.pipeline.algorithms.maml.settings import MAMLVPG, ProMP
from metaloom.pipeline.baselines import BaselineConfig
from metaloom.pipeline.estimation.config import ProcessingConfig
from metaloom.pipeline.nn.spec import Spaces
from metaloom.pipeline.policies import PolicyConfig
from metaloom.pipeline.policies.build import GaussianPolicy
from metaloom.pipeline.types import TaskParams

POLICY = GaussianPolicy(Spaces((3,), 1.0, 2, 0), PolicyConfig(hidden_sizes=(4,)))


def build(settings, policy=POLICY):
    sizes = ((3,), 1.0, policy.action_size, 0, "toy", 5)
    return settings.build(Setup(*sizes, policy.config, BaselineConfig(), ProcessingConfig(), "cpu", np.negative))


def setup(promp, steps, policy=POLICY, tasks_per_chunk=2):
    learner = build(promp, policy).initialize(run_seed=0)
    meta_params = {k: v.astype(np.float64) for k, v in (learner.params | step_size_logs(learner.extra)).items()}
    chunks = build_chunks(steps, tasks_per_chunk, dtype=torch.float64)
    return build(promp, policy).problem(learner, steps), meta_params, chunks


def central_difference(problem, meta_params, chunks, name, index, h=1e-6):
    def loss(shift):
        moved = {key: value.copy() for key, value in meta_params.items()}
        moved[name][index] += shift
        return meta_objective(problem, moved, chunks)["loss"].mean()

    return (loss(h) - loss(-h)) / (2 * h)


def assert_gradient_is_right(problem, meta_params, chunks, learned):
    gradients, *_ = meta_gradient(problem, meta_params, chunks)
    assert list(gradients) == list(learned)
    rng = np.random.default_rng(0)
    for name, gradient in gradients.items():
        for _ in range(3):
            index = tuple(rng.integers(0, n) for n in gradient.shape)
            expected = central_difference(problem, meta_params, chunks, name, index)
            assert gradient[index] == pytest.approx(expected, rel=1e-5, abs=1e-8), (name, index)


@pytest.mark.parametrize("inner_steps", [0, 1, 2])
def test_gradient_agrees_with_central_differences(random_steps, inner_steps):
    promp = ProMP(inner_steps=inner_steps, inner_lr=0.3, init_inner_kl_penalty=0.5)
    problem, meta_params, chunks = setup(promp, random_steps(inner_steps + 1))
    assert_gradient_is_right(problem, meta_params, chunks, meta_params)


def test_gradient_of_trainable_step_sizes_agrees_with_central_differences(random_steps):
    promp = ProMP(inner_steps=2, inner_lr=0.3, trainable_inner_lr=True)
    problem, meta_params, chunks = setup(promp, random_steps(3))
    logs = [name for name in meta_params if name.startswith(LOG_INNER_LR)]
    assert len(logs) == 5
    for name in logs:
        meta_params[name][1] += 0.5
    assert_gradient_is_right(problem, meta_params, chunks, meta_params)
    gradients, *_ = meta_gradient(problem, meta_params, chunks)
    for k in range(2):
        assert abs(gradients[LOG_INNER_LR + "log_std"][k]).min() > 1e-6


def test_a_fixed_standard_deviation_has_no_gradient_and_is_not_adapted(random_steps):
    policy = GaussianPolicy(Spaces((3,), 1.0, 2, 0), PolicyConfig(hidden_sizes=(4,), learn_std=False))
    steps = random_steps(2)
    problem, meta_params, chunks = setup(ProMP(inner_lr=0.3), steps, policy)
    assert_gradient_is_right(problem, meta_params, chunks, [name for name in meta_params if name != "log_std"])


def test_first_order_gradient_is_that_of_the_outer_loss_at_the_adapted_parameters(random_steps):
    steps = random_steps(2)
    promp = ProMP(first_order=True, inner_lr=0.3, init_inner_kl_penalty=0.0)
    problem, meta_params, chunks = setup(promp, steps)
    found, *_ = meta_gradient(problem, meta_params, chunks)
    total = {name: torch.zeros(value.shape, dtype=torch.float64) for name, value in meta_params.items()}
    for b in range(3):
        before, after = (task_rows(step, slice(b, b + 1), dtype=torch.float64) for step in steps)
        leaves = {name: torch.tensor(value)[None].requires_grad_() for name, value in meta_params.items()}
        inner = likelihood_ratio_loss(POLICY.distribution(leaves, before.observations), before)
        gradients = torch.autograd.grad(inner.sum(), list(leaves.values()))
        adapted = {
            name: (leaf - 0.3 * g).detach().requires_grad_()
            for (name, leaf), g in zip(leaves.items(), gradients, strict=True)
        }
        outer = promp_objective(
            [POLICY.distribution(leaves, before.observations), POLICY.distribution(adapted, after.observations)],
            Chunk(b, [before, after]),
            clip_eps=promp.clip_eps,
            kl_coeffs=[0.0],
        )["loss"]
        outer_gradients = torch.autograd.grad(outer.sum(), list(adapted.values()))
        for name, g in zip(adapted, outer_gradients, strict=True):
            total[name] += g[0] / 3
    for name, expected in total.items():
        np.testing.assert_allclose(found[name], expected, rtol=1e-9, atol=1e-12)


def test_first_and_second_order_differ(random_steps):
    steps = random_steps(2)
    results = []
    for first_order in (False, True):
        problem, meta_params, chunks = setup(ProMP(first_order=first_order, inner_lr=0.3), steps)
        results.append(meta_gradient(problem, meta_params, chunks)[0]["mean_network.output.bias"])
    assert abs(results[0] - results[1]).max() > 1e-3


def on_policy(step, params):
    """The step as if `params` ([B, ...], float32) had acted on its observations."""
    tensors = {name: torch.from_numpy(np.array(value)) for name, value in params.items()}
    B, E, T = step.episodes.rewards.shape
    rows = torch.from_numpy(step.episodes.observations[:, :, :T].reshape(B, E * T, -1))
    mean, log_std = POLICY.distribution(tensors, rows)
    behavior = {"mean": mean.numpy().reshape(step.episodes.actions.shape), "log_std": log_std[:, 0].numpy()}
    return dataclasses.replace(step, episodes=dataclasses.replace(step.episodes, behavior=behavior))


def test_ratios_are_one_and_kls_zero_before_the_first_update(random_steps):
    promp = ProMP()
    learner = build(promp).initialize(run_seed=0)
    raw = random_steps(2)
    before = TaskParams.broadcast(learner.params, 3)
    step_0 = on_policy(raw[0], before.params)
    adapted = build(promp).adapt(learner, before, step_0)
    step_1 = on_policy(raw[1], adapted.params)
    values = meta_objective(
        build(promp).problem(learner, [step_0, step_1]), learner.params, build_chunks([step_0, step_1], 2)
    )
    advantages = [raw[1].samples.advantages[b][raw[1].samples.mask[b] == 1].mean() for b in range(3)]
    np.testing.assert_allclose(values["loss"], np.negative(advantages), atol=1e-6)
    for name in ("inner_kl_0", "outer_kl", "clip_fraction"):
        np.testing.assert_allclose(values[name], 0, atol=1e-6, err_msg=name)


def test_on_policy_inner_step_is_the_policy_gradient_step(random_steps):
    # At ratio 1, ∇(r A) = A ∇log π: likelihood-ratio and log-likelihood losses have the same gradient.
    learner = build(ProMP()).initialize(run_seed=0)
    before = TaskParams.broadcast(learner.params, 3)
    step = on_policy(random_steps(1)[0], before.params)
    ratio, log_likelihood = (
        build(MAMLVPG(inner_lr=0.5, inner_loss=loss)).adapt(learner, before, step)
        for loss in ("likelihood_ratio", "log_likelihood")
    )
    for name in learner.params:
        np.testing.assert_allclose(ratio.params[name], log_likelihood.params[name], rtol=1e-5, atol=1e-6)
        assert abs(ratio.params[name] - before.params[name]).max() > 1e-4


def test_bits_do_not_depend_on_threads(random_steps):
    promp = ProMP(inner_steps=2, tasks_per_chunk=1, trainable_inner_lr=True)
    learner, steps = build(promp).initialize(run_seed=0), random_steps(3, B=7)
    before = TaskParams.broadcast(learner.params, 7)
    serial = build(promp).update(learner, steps, run_seed=0, iteration=0)
    adapted = build(promp).adapt(learner, before, steps[0])
    with ThreadPoolExecutor(3) as pool:
        threaded = build(promp).update(learner, steps, run_seed=0, iteration=0, parallel=pool.map)
        adapted_threaded = build(promp).adapt(learner, before, steps[0], parallel=pool.map)
    assert threaded[1] == serial[1]
    for name, value in (serial[0].params | serial[0].optimizer | serial[0].extra).items():
        np.testing.assert_array_equal((threaded[0].params | threaded[0].optimizer | threaded[0].extra)[name], value)
    for name, value in adapted.params.items():
        np.testing.assert_array_equal(adapted_threaded.params[name], value)


def test_chunk_size_changes_memory_but_not_the_result(random_steps):
    steps = random_steps(2, B=5)
    gradients = []
    for tasks_per_chunk in (1, 2, 5):
        problem, meta_params, chunks = setup(ProMP(), steps, tasks_per_chunk=tasks_per_chunk)
        assert len(chunks) == -(-5 // tasks_per_chunk)
        gradients.append(meta_gradient(problem, meta_params, chunks)[0])
    for name, value in gradients[0].items():
        for other in gradients[1:]:
            np.testing.assert_allclose(other[name], value, rtol=1e-9, atol=1e-13)


def test_a_loss_that_overflows_is_refused_by_the_number_of_its_task(random_steps):
    promp = ProMP(inner_lr=0.1)
    steps = random_steps(2)
    advantages = steps[0].samples.advantages.copy()
    advantages[2] *= 1e30
    poisoned = dataclasses.replace(steps[0], samples=dataclasses.replace(steps[0].samples, advantages=advantages))
    learner = build(promp).initialize(run_seed=0)
    with pytest.raises(NumericalError, match=r"task 2 holds .* Lower"):
        build(promp).update(learner, [poisoned, steps[1]], run_seed=0, iteration=0)


def test_an_adaptation_that_overflows_is_refused_by_task_and_parameter(random_steps):
    promp = ProMP(inner_lr=1e30)
    (step,) = random_steps(1, advantage_scale=1e20)
    learner = build(promp).initialize(run_seed=0)
    with pytest.raises(NumericalError, match=r"adapted mean_network\.\S+ of task 0 holds"):
        build(promp).adapt(learner, TaskParams.broadcast(learner.params, 3), step)

"""DICE-MAML and VPG-DICE: identities of the estimator, meta-gradients, and every option."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from metaloom.pipeline.algorithms.contract import Setup
from metaloom.pipeline.algorithms.maml.learner import step_size_logs
from metaloom.pipeline.algorithms.maml.meta_gradient import meta_gradient, meta_objective
from metaloom.pipeline.algorithms.maml.policy_gradient import (
    dice_loss,
    log_likelihood_per_cell,
    sums_by_product,
    sums_over_time,
)
from metaloom.pipeline.algorithms.maml.rows import build_chunks, minibatches, task_rows
from metaloom.pipeline.algorithms.maml.settings import DiceMAML, ProMP, VPGDice
from metaloom.pipeline.baselines import BaselineConfig
from metaloom.pipeline.estimation.config import ProcessingConfig
from metaloom.pipeline.nn.optimizers import STEP_COUNT
from metaloom.pipeline.nn.spec import Spaces
from metaloom.pipeline.policies import PolicyConfig
from metaloom.pipeline.policies.build import GaussianPolicy
from metaloom.pipeline.types import LearnerState, TaskParams

POLICY = GaussianPolicy(Spaces((3,), 1.0, 2, 0), PolicyConfig(hidden_sizes=(4,)))


def build(settings, policy=POLICY):
    sizes = ((3,), 1.0, policy.action_size, 0, "toy", 5)
    return settings.build(Setup(*sizes, policy.config, BaselineConfig(), ProcessingConfig(), "cpu", np.negative))


DICE_ALGORITHMS = (DiceMAML, VPGDice)
ALL = slice(0, 3)
both = pytest.mark.parametrize("dice", DICE_ALGORITHMS)


@pytest.fixture
def dice_steps(random_steps):
    """Random rounds as processing for DiCE gives them."""

    def steps(num_rounds=2, *, seed=0, **sizes):
        rng = np.random.default_rng(seed + 100)
        return [with_adjusted_rewards(step, rng) for step in random_steps(num_rounds, seed=seed, **sizes)]

    return steps


def with_adjusted_rewards(step, rng):
    mask = step.samples.mask
    adjusted = rng.standard_normal(mask.shape, np.float32) * mask
    return dataclasses.replace(step, samples=dataclasses.replace(step.samples, adjusted_rewards=adjusted))


def parameters(num_tasks=3, seed=0):
    """Float64 leaves [b, ...] of a policy, different in every task."""
    rng = np.random.default_rng(seed)
    return {
        name: torch.tensor(value + 0.1 * rng.standard_normal((num_tasks, *value.shape)), requires_grad=True)
        for name, value in POLICY.initialize(rng).items()
    }


def current(leaves, rows):
    return POLICY.distribution(leaves, rows.observations)


def flat(tensors):
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def gradient(loss, leaves, **options):
    return flat(torch.autograd.grad(loss.sum(), list(leaves.values()), **options))


def test_without_a_baseline_the_value_is_minus_the_mean_discounted_return_per_step(dice_steps):
    (step,) = dice_steps(1)
    rows = task_rows(step, ALL, dtype=torch.float64)
    loss = dice_loss(current(parameters(), rows), rows)
    returns = step.samples.adjusted_rewards.sum(-1)
    np.testing.assert_allclose(loss.detach() * 5, -returns.mean(-1), rtol=1e-6)


def test_the_value_is_the_same_for_all_parameters_and_the_gradient_is_not(dice_steps):
    rows = task_rows(dice_steps(1)[0], ALL, dtype=torch.float64)
    losses, gradients = [], []
    for seed in range(2):
        leaves = parameters(seed=seed)
        losses.append(dice_loss(current(leaves, rows), rows))
        gradients.append(gradient(losses[-1], leaves))
    torch.testing.assert_close(losses[0], losses[1], rtol=0, atol=0)
    assert (gradients[0] - gradients[1]).abs().max() > 1e-3


def test_the_gradient_is_the_policy_gradient_with_rewards_to_go(dice_steps):
    (step,) = dice_steps(1)
    rows = task_rows(step, ALL, dtype=torch.float64)
    leaves = parameters()
    found = gradient(dice_loss(current(leaves, rows), rows), leaves)
    adjusted = torch.from_numpy(step.samples.adjusted_rewards).double()
    to_go = adjusted.flip(-1).cumsum(-1).flip(-1).reshape(3, -1)
    log_prob = current(leaves, rows).log_prob(rows.actions)
    expected = gradient(-(log_prob * to_go).sum(-1) / 10, leaves)
    torch.testing.assert_close(found, expected)


def test_the_second_derivative_is_that_of_the_likelihood_ratio_of_whole_pasts(dice_steps):
    # Where π acted, d²/dθ² Π_{t'≤t} π_θ/π_behavior = d²/dθ² ☐_t: the ratio is not DiCE, but says what DiCE must give.
    rows = task_rows(dice_steps(1)[0], ALL, dtype=torch.float64)
    leaves = parameters()
    log_prob = rows.episodes.split(current(leaves, rows).log_prob(rows.actions))
    ratio_of_past = (log_prob - log_prob.detach()).exp().cumprod(-1)
    expected = -(ratio_of_past * rows.episodes.adjusted_rewards * rows.episodes.mask).sum((-2, -1)) / 10
    found = dice_loss(current(leaves, rows), rows)
    torch.testing.assert_close(hessian(found, leaves), hessian(expected, leaves))


def test_the_second_derivative_agrees_with_central_differences_of_the_expected_return(dice_steps):
    # E_{a ~ π_θ}[c] over a fixed set of actions, each weighted by its ratio to the policy at θ₀: a function of θ with a
    # value away from θ₀, unlike the DiCE loss, whose derivatives at θ₀ must be its derivatives.
    rows = task_rows(dice_steps(1)[0], ALL, dtype=torch.float64)
    leaves = parameters()
    start = rows.episodes.split(current(leaves, rows).log_prob(rows.actions)).detach().cumsum(-1)

    def expected_cost_gradient(values):
        log_prob = rows.episodes.split(current(values, rows).log_prob(rows.actions)).cumsum(-1)
        weighted = (log_prob - start).exp() * rows.episodes.adjusted_rewards * rows.episodes.mask
        return gradient(-weighted.sum((-2, -1)) / 10, values)

    found = hessian(dice_loss(current(leaves, rows), rows), leaves)
    offset = 0
    rng = np.random.default_rng(0)
    for name, leaf in leaves.items():
        index = int(rng.integers(leaf.numel()))
        sides = []
        for shift in (1e-6, -1e-6):
            moved = {key: value.detach().clone() for key, value in leaves.items()}
            moved[name].reshape(-1)[index] += shift
            sides.append(expected_cost_gradient({key: value.requires_grad_() for key, value in moved.items()}))
        torch.testing.assert_close(found[offset + index], (sides[0] - sides[1]) / 2e-6, rtol=1e-5, atol=1e-7)
        offset += leaf.numel()


def hessian(loss, leaves):
    first = gradient(loss, leaves, create_graph=True)
    rows = [flat(torch.autograd.grad(entry, list(leaves.values()), retain_graph=True)) for entry in first]
    return torch.stack(rows)


@pytest.mark.parametrize("loss", [dice_loss, log_likelihood_per_cell])
def test_padding_takes_no_part_in_value_gradient_or_second_derivative(dice_steps, loss):
    (step,) = dice_steps(1)
    mask, rng = step.samples.mask == 0, np.random.default_rng(5)

    def garbage(values, where):
        return np.where(where, rng.standard_normal(values.shape, np.float32), values).astype(np.float32)

    episodes = dataclasses.replace(
        step.episodes,
        observations=garbage(step.episodes.observations, np.pad(mask, [(0, 0), (0, 0), (0, 1)])[..., None]),
        actions=garbage(step.episodes.actions, mask[..., None]),
    )
    samples = dataclasses.replace(
        step.samples,
        adjusted_rewards=garbage(step.samples.adjusted_rewards, mask),
        advantages=garbage(step.samples.advantages, mask),
    )
    leaves, results = parameters(), []
    for variant in (step, dataclasses.replace(step, episodes=episodes, samples=samples)):
        rows = task_rows(variant, ALL, dtype=torch.float64)
        values = loss(current(leaves, rows), rows)
        results.append((values.detach(), gradient(values, leaves, create_graph=True), hessian(values, leaves)))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_a_padded_episode_counts_like_the_unpadded_one(dice_steps):
    # One episode of three real steps in five cells: the loss is that of three cells, at the scale of five.
    (step,) = dice_steps(1, B=1, E=1, ragged=False)
    lengths = np.full((1, 1), 3, np.int32)
    mask = (np.arange(5) < 3).astype(np.float32).reshape(1, 1, 5)
    padded = dataclasses.replace(
        step,
        episodes=dataclasses.replace(step.episodes, lengths=lengths),
        samples=dataclasses.replace(step.samples, mask=mask),
    )
    rows = task_rows(padded, slice(0, 1), dtype=torch.float64)
    leaves = parameters(1)
    found = gradient(dice_loss(current(leaves, rows), rows), leaves)
    log_prob = current(leaves, rows).log_prob(rows.actions)[0, :3]
    adjusted = rows.episodes.adjusted_rewards[0, 0, :3]
    expected = gradient(-(adjusted * (log_prob.cumsum(0) - log_prob.cumsum(0).detach()).exp()).sum() / 5, leaves)
    torch.testing.assert_close(found, expected)


def setup(algorithm, steps, policy=POLICY, tasks_per_chunk=2):
    learner = build(algorithm, policy).initialize(run_seed=0)
    meta_params = {k: v.astype(np.float64) for k, v in (learner.params | step_size_logs(learner.extra)).items()}
    return (
        build(algorithm, policy).problem(learner, steps),
        meta_params,
        build_chunks(steps, tasks_per_chunk, dtype=torch.float64),
    )


class MovingDice:
    """The DiCE loss with τ - τ(θ₀) in the exponent, θ₀ being where it is first asked: a function with a value.

    At θ₀ its derivatives are those of the DiCE loss by definition; away from it the loss itself can be differenced, and
    so can its gradient. Neither can be for the DiCE loss, whose value and gradient are evaluated as if π_θ had acted.
    """

    def __init__(self):
        self.start = {}

    def __call__(self, distribution, rows):
        past = rows.episodes.split(distribution.log_prob(rows.actions)).cumsum(-1)
        past = past - self.start.setdefault(id(rows), past.detach())
        return -rows.episodes.mean_over_cells(past.exp() * rows.episodes.adjusted_rewards)


@both
@pytest.mark.parametrize(("inner_steps", "trainable"), [(0, False), (1, False), (2, False), (2, True)])
def test_the_meta_gradient_agrees_with_central_differences_of_losses_that_move(
    dice_steps, dice, inner_steps, trainable
):
    algorithm = dice(inner_steps=inner_steps, inner_lr=0.3, trainable_inner_lr=trainable)
    problem, meta_params, chunks = setup(algorithm, dice_steps(inner_steps + 1))
    gradients, *_ = meta_gradient(problem, meta_params, chunks)
    moving = MovingDice()
    outer = moving if dice is DiceMAML else log_likelihood_per_cell
    moving_problem = dataclasses.replace(
        problem,
        inner_loss=moving,
        objective=lambda distributions, chunk: {"loss": outer(distributions[-1], chunk.rounds[-1])},
    )
    meta_objective(moving_problem, meta_params, chunks)
    rng = np.random.default_rng(0)
    assert gradients.keys() == meta_params.keys()
    for name, found in gradients.items():
        for _ in range(3):
            index = tuple(rng.integers(0, n) for n in found.shape)
            expected = central_difference(
                lambda params: meta_objective(moving_problem, params, chunks)["loss"].mean(), meta_params, name, index
            )
            assert found[index] == pytest.approx(expected, rel=1e-5, abs=1e-8), (name, index)


def central_difference(loss, params, name, index, h=1e-6):
    def at(shift):
        moved = {key: value.copy() for key, value in params.items()}
        moved[name][index] += shift
        return loss(moved)

    return (at(h) - at(-h)) / (2 * h)


def optimize(algorithm, steps, learner=None, *, policy=POLICY, run_seed=0, iteration=0, **options):
    learner = learner or build(algorithm, policy).initialize(run_seed=1)
    return build(algorithm, policy).update(learner, steps, run_seed=run_seed, iteration=iteration, **options)


def distance(a: LearnerState, b: LearnerState) -> float:
    return max(abs(a.params[name] - b.params[name]).max() for name in a.params)


@both
@pytest.mark.parametrize(
    "changed",
    [
        {"inner_lr": 1.0},
        {"first_order": True},
        {"outer_lr": 1e-2},
        {"num_epochs": 2},
        {"num_minibatches": 2},
        {"trainable_inner_lr": True, "num_epochs": 2, "outer_lr": 0.5},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_every_option_changes_the_learner(dice_steps, dice, changed):
    steps = dice_steps(2)
    base = {name: changed[name] for name in ("num_epochs", "outer_lr") if len(changed) > 1}
    assert distance(optimize(dice(**base), steps)[0], optimize(dice(**changed), steps)[0]) > 1e-5


def test_a_tolerance_skips_the_remaining_epochs_of_vpg_dice(dice_steps):
    steps = dice_steps(2)
    _, metrics = optimize(VPGDice(num_epochs=9, tolerance=1e9), steps)
    assert metrics["epochs"] == 1
    updated, metrics = optimize(VPGDice(num_epochs=9, tolerance=1e-12), steps)
    assert metrics["epochs"] == 9
    assert updated.optimizer[STEP_COUNT] == 9


def test_a_tolerance_on_a_loss_that_never_changes_is_refused():
    with pytest.raises(ValidationError, match="constant in the parameters"):
        DiceMAML(num_epochs=2, tolerance=1e-3)


def test_the_loss_of_dice_maml_is_the_same_before_and_after_an_update(dice_steps):
    updated, metrics = optimize(DiceMAML(outer_lr=0.1), dice_steps(2))
    assert metrics["loss_before"] == metrics["loss_after"]
    assert metrics["meta_gradient_norm"] > 1e-3
    assert distance(updated, build(DiceMAML()).initialize(run_seed=1)) > 0.01


def test_an_update_of_vpg_dice_lowers_its_loss(dice_steps):
    _, metrics = optimize(VPGDice(), dice_steps(2))
    assert metrics["loss_after"] < metrics["loss_before"]


@both
def test_metrics_tell_how_far_the_policies_are_from_those_that_acted(dice_steps, dice):
    steps = dice_steps(3)
    near, far = (optimize(dice(inner_steps=2, outer_lr=lr), steps)[1] for lr in (1e-3, 0.3))
    assert {"loss_before", "loss_after", "inner_kl", "outer_kl", "meta_gradient_norm"} <= near.keys()
    for name in ("inner_kl", "outer_kl"):
        assert abs(far[name] - near[name]) > 0.01


@both
def test_adaptation_lowers_the_cost_of_the_same_actions(dice_steps, dice):
    # A step against the gradient makes what was rewarded more likely.
    (step,) = dice_steps(1)
    algorithm = dice(inner_lr=0.01)
    learner = build(algorithm).initialize(run_seed=1)
    before = TaskParams.broadcast(learner.params, 3)
    after = build(algorithm).adapt(learner, before, step)
    rows = task_rows(step, ALL, dtype=torch.float64)
    to_go = rows.episodes.adjusted_rewards.flip(-1).cumsum(-1).flip(-1)

    def log_likelihood(params):
        leaves = {name: torch.tensor(np.array(value), dtype=torch.float64) for name, value in params.params.items()}
        return (rows.episodes.split(current(leaves, rows).log_prob(rows.actions)) * to_go).sum((-2, -1))

    assert (log_likelihood(after) > log_likelihood(before)).all()


@both
def test_bits_do_not_depend_on_threads(dice_steps, dice):
    algorithm = dice(inner_steps=2, tasks_per_chunk=1, num_minibatches=2)
    steps = dice_steps(3, B=7)
    serial = optimize(algorithm, steps)
    with ThreadPoolExecutor(3) as pool:
        threaded = optimize(algorithm, steps, parallel=pool.map)
    assert threaded[1] == serial[1]
    assert distance(threaded[0], serial[0]) == 0


@both
def test_chunks_change_memory_but_not_the_result(dice_steps, dice):
    steps = dice_steps(2, B=5)
    gradients = []
    for tasks_per_chunk in (1, 2, 5):
        problem, meta_params, chunks = setup(dice(), steps, tasks_per_chunk=tasks_per_chunk)
        gradients.append(meta_gradient(problem, meta_params, chunks)[0])
    for name, value in gradients[0].items():
        for other in gradients[1:]:
            np.testing.assert_allclose(other[name], value, rtol=1e-9, atol=1e-13)


def test_minibatches_are_whole_episodes_and_partition_them(dice_steps):
    (step,) = dice_steps(1, E=5, T=4)
    parts = minibatches(step.samples, 2, np.random.default_rng(0))
    assert [part.shape for part in parts] == [(3, 12), (3, 8)]
    for b in range(3):
        episodes = np.concatenate([part[b].reshape(-1, 4) for part in parts])
        np.testing.assert_array_equal(episodes % 4, np.tile(np.arange(4), (5, 1)))
        assert sorted(episodes[:, 0] // 4) == list(range(5))
    assert not np.array_equal(parts[0][0], parts[0][1])


def test_a_minibatch_holds_the_steps_of_its_episodes(dice_steps):
    (step,) = dice_steps(1, E=5, T=4)
    (part, _) = minibatches(step.samples, 2, np.random.default_rng(0))
    rows = task_rows(step, ALL, part)
    for b in range(3):
        chosen = part[b].reshape(-1, 4)[:, 0] // 4
        np.testing.assert_array_equal(rows.episodes.adjusted_rewards[b], step.samples.adjusted_rewards[b][chosen])
        np.testing.assert_array_equal(rows.episodes.mask[b], step.samples.mask[b][chosen])


@both
def test_more_minibatches_than_episodes_are_refused(dice_steps, dice):
    with pytest.raises(ValueError, match="3 minibatches for 2 episodes"):
        optimize(dice(num_minibatches=3), dice_steps(2, E=2))


@both
def test_samples_of_other_processing_are_refused(random_steps, dice):
    with pytest.raises(ValueError, match=r"no adjusted rewards.*processing\.name=dice"):
        optimize(dice(), random_steps(2))


def test_other_algorithms_compute_the_same_from_samples_with_adjusted_rewards(random_steps, dice_steps):
    plain, dice = (optimize(ProMP(), steps(2)) for steps in (random_steps, dice_steps))
    for name, value in plain[0].params.items():
        np.testing.assert_allclose(dice[0].params[name], value, atol=1e-5)


def test_adjusted_rewards_that_are_not_finite_are_named(dice_steps):
    steps = dice_steps(2)
    steps[1].samples.adjusted_rewards[2, 0, 0] = np.nan
    with pytest.raises(ArithmeticError, match="rollout batch 1: adjusted rewards of task 2 holds nan"):
        optimize(DiceMAML(), steps)


@both
def test_a_fixed_standard_deviation_stays(dice_steps, dice):
    policy = GaussianPolicy(Spaces((3,), 1.0, 2, 0), PolicyConfig(hidden_sizes=(4,), learn_std=False, init_std=0.7))
    updated, _ = optimize(dice(outer_lr=0.1), dice_steps(2), policy=policy)
    np.testing.assert_array_equal(updated.params["log_std"], np.full(2, np.log(0.7), np.float32))


def test_off_the_cpu_sums_over_time_are_products_which_have_a_deterministic_algorithm(monkeypatch):
    values = torch.rand(2, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    torch.testing.assert_close(sums_by_product(values), values.cumsum(-1))
    assert torch.autograd.gradgradcheck(lambda x: sums_by_product(x).exp(), values)
    assert torch.equal(sums_over_time(values), values.cumsum(-1))
    monkeypatch.setattr(torch.Tensor, "cumsum", None)
    assert sums_over_time(values.to("meta")).shape == values.shape

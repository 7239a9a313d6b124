"""DQL's gradient steps: numbers by hand, autograd in float64, and what each setting does."""

import numpy as np
import pytest
import torch

from metaloom.pipeline.algorithms.contract import NumericalError
from metaloom.pipeline.algorithms.off_policy.settings import DQL
from metaloom.pipeline.kernels.dql import huber_loss
from metaloom.pipeline.types import Minibatch, Transitions

from .conftest import DISCRETE, N, doubles, leaves, relu_network, same

NAMES = {"q_loss", "q_mean", "target_mean", "gradient_norm", "gradient_steps", "epsilon", "learning_rate"}


@pytest.fixture(params=["fused", "torch"])
def update(minibatches, request):
    """Gradient steps from the start; returns the learner before and after, and the metrics."""

    def run(settings, count=1, learner=None, batches=None):
        settings = settings.model_copy(update={"kernel": request.param})
        algorithm = settings.build(DISCRETE)
        learner = learner or algorithm.initialize(run_seed=0)
        batches = minibatches(DISCRETE, count) if batches is None else batches
        after, metrics = algorithm.update(learner, batches, run_seed=0, iteration=0)
        return learner, after, metrics

    return run


def test_the_huber_loss_by_hand():
    loss, slopes = huber_loss(np.array([0.5, -3.0, 1.0], np.float32))
    assert loss == pytest.approx((0.125 + 2.5 + 0.5) / 3)
    np.testing.assert_allclose(slopes, np.array([0.5, -1, 1]) / 3, rtol=1e-6)


def constant_learner(algorithm, q, target):
    """Q-functions that do not depend on the observation: output kernels of zero."""
    learner = algorithm.initialize(run_seed=0)
    for arrays, name, values in ((learner.params, "q_network", q), (learner.extra, "target_q", target)):
        arrays[f"{name}.output.kernel"] = np.zeros_like(arrays[f"{name}.output.kernel"])
        arrays[f"{name}.output.bias"] = np.array(values, np.float32)
    return learner


def test_the_stored_action_learns_and_the_end_of_a_task_has_no_future_by_hand():
    # Rewards 1, γ = 0.9, max Q̄ = 2. The stored action is 0, with Q = 0.5, while the best, with Q = 3, is 3.
    # Where the task goes on the goal is 1 + 0.9 * 2 = 2.8 (error -2.3, slope -1); where it ended 1 (error -0.5).
    algorithm = DQL(max_grad_norm=None, learning_rate=0.01, target_update_intvl=100).build(DISCRETE)
    learner = constant_learner(algorithm, [0.5, 1, 2, 3], [2, 1, 0, -1])
    zeros = np.zeros((1, 2, 3), np.float32)
    ended = np.array([[False, True]])
    batch = Minibatch(Transitions(zeros, np.zeros((1, 2), np.int64), np.ones((1, 2), np.float32), zeros, ended))
    after, metrics = algorithm.update(learner, [batch], run_seed=0, iteration=0)
    assert metrics["target_mean"] == pytest.approx((2.8 + 1) / 2)
    assert metrics["q_mean"] == pytest.approx(0.5)
    assert metrics["q_loss"] == pytest.approx(((2.3 - 0.5) + 0.125) / 2)
    gradient = -(1 + 0.5) / 2
    step = 0.01 * gradient / (np.sqrt(0.01 * gradient**2) + 1e-5)
    np.testing.assert_allclose(after.params["q_network.output.bias"], [0.5 - step, 1, 2, 3], rtol=1e-5)


def test_a_gradient_step_is_rmsprop_on_the_gradient_that_autograd_finds(update, minibatches):
    settings = DQL(max_grad_norm=None)
    # The target network is another one, as it is between copies.
    learner = settings.build(DISCRETE).initialize(run_seed=0)
    for name, value in learner.extra.items():
        if name.startswith("target_q."):
            learner.extra[name] = value + np.float32(0.1)
    before, after, metrics = update(settings, learner=learner)
    (batch,) = minibatches(DISCRETE)
    o, a, r, following, goes_on = doubles(batch.transitions)
    params, targets = leaves(before.params), leaves(before.extra, "target_q.")
    goals = r + 0.9 * goes_on * relu_network(targets, "target_q", following).amax(1)
    q = relu_network(params, "q_network", o).gather(1, a[:, None])[:, 0]
    loss = torch.nn.functional.smooth_l1_loss(q, goals.detach())
    gradients = dict(zip(params, torch.autograd.grad(loss, list(params.values())), strict=True))
    norm = np.sqrt(sum(float(g.square().sum()) for g in gradients.values()))
    assert metrics["q_loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["gradient_norm"] == pytest.approx(norm, rel=1e-5)
    for name, gradient in gradients.items():
        g = gradient.numpy()
        expected = before.params[name] - 5e-4 * g / (np.sqrt(0.01 * g**2) + 1e-5)
        np.testing.assert_allclose(after.params[name], expected, rtol=1e-3, atol=1e-5)


def test_targets_equal_the_q_function_at_first_and_after_every_interval_of_the_run(update):
    learner = DQL().build(DISCRETE).initialize(run_seed=0)
    copied = []
    for count in (2, 2, 1, 1):
        _, learner, _ = update(DQL(target_update_intvl=3), count, learner)
        kernels = learner.params["q_network.output.kernel"], learner.extra["target_q.output.kernel"]
        copied.append(np.array_equal(*kernels))
    assert copied == [False, False, False, True]  # after 2, 4, 5 and 6 steps, copied at 3 and at 6
    fresh = DQL().build(DISCRETE).initialize(run_seed=0)
    for name, value in fresh.params.items():
        np.testing.assert_array_equal(value, fresh.extra[name.replace("q_network", "target_q")])


def test_what_acts_is_the_q_function_and_an_epsilon_that_falls_with_every_iteration(update):
    settings = DQL(eps_init=0.45, eps_final=0.05, eps_schedule_gamma=0.5)
    algorithm = settings.build(DISCRETE)
    learner, found = None, []
    for _ in range(3):
        before, learner, metrics = update(settings, 4, learner)
        acting = algorithm.acting_params(before, 2).params
        assert set(acting) == {*before.params, "epsilon"}
        assert acting["epsilon"].shape == (2,)
        assert acting["epsilon"].dtype == np.float32
        assert acting["epsilon"][1] == pytest.approx(metrics["epsilon"])
        found.append(metrics["epsilon"])
    assert found == pytest.approx([0.45, 0.25, 0.15])


def test_steps_in_one_iteration_or_two_come_to_the_same(update, minibatches):
    batches = minibatches(DISCRETE, 5)
    _, at_once, _ = update(DQL(), batches=batches)
    _, learner, _ = update(DQL(), batches=batches[:2])
    _, learner, _ = update(DQL(), learner=learner, batches=batches[2:])
    assert same(at_once, type(learner)(learner.params, learner.optimizer, learner.extra | {"num_updates": np.array(1)}))


def test_the_same_twice_and_nothing_given_is_changed(update):
    settings = DQL(target_update_intvl=1)
    learner = settings.build(DISCRETE).initialize(run_seed=0)
    _, first, metrics = update(settings, 3, learner)
    _, second, _ = update(settings, 3, learner)
    assert same(first, second)
    assert same(learner, settings.build(DISCRETE).initialize(run_seed=0))
    assert set(metrics) == NAMES
    assert all(np.isfinite(value) for value in metrics.values())


def test_an_iteration_without_gradient_steps_counts_and_has_no_means(update):
    before, after, metrics = update(DQL(), 0)
    assert set(metrics) == NAMES
    assert metrics["gradient_steps"] == 0
    assert np.isnan(metrics["q_loss"])
    assert metrics["epsilon"] == 1
    assert int(after.extra["num_updates"]) == 1
    assert int(after.extra["num_gradient_steps"]) == 0
    assert all(np.array_equal(after.params[name], value) for name, value in before.params.items())


@pytest.mark.parametrize(
    "changes",
    [
        {"learning_rate": 1e-3},
        {"max_grad_norm": 1e-3},
        {"target_update_intvl": 1},
        {"lr_schedule": "exponential", "lr_decay": 0.5},
        {"lr_schedule": "linear", "lr_horizon": 3},
    ],
)
def test_every_setting_of_an_update_matters(update, changes):
    def two_iterations(settings):
        _, learner, _ = update(settings, 3)
        return update(settings, 3, learner)[1]

    assert not same(two_iterations(DQL()), two_iterations(DQL(**changes)))


def test_gradients_are_shortened_to_their_limit(minibatches):
    settings = DQL(max_grad_norm=1e-3)
    learner = settings.build(DISCRETE).initialize(run_seed=0)
    steps = settings.build(DISCRETE).gradient_steps(learner)
    (batch,) = minibatches(DISCRETE)
    assert float(steps.step(batch, None)["gradient_norm"]) > 1e-2
    assert np.linalg.norm(steps.copies["q"].gradient) == pytest.approx(1e-3, rel=1e-5)


def test_the_q_function_approaches_rewards_where_every_step_is_the_last(minibatches):
    (batch,) = minibatches(DISCRETE)
    t = batch.transitions
    ends = Minibatch(Transitions(t.observations, t.actions, t.rewards, t.next_observations, np.ones((1, N), bool)))
    algorithm = DQL(learning_rate=3e-3).build(DISCRETE)
    learner = algorithm.initialize(run_seed=0)
    _, first = algorithm.update(learner, [ends], run_seed=0, iteration=0)
    learner, _ = algorithm.update(learner, [ends] * 600, run_seed=0, iteration=0)
    _, last = algorithm.update(learner, [ends], run_seed=0, iteration=1)
    assert last["q_loss"] < 0.05 * first["q_loss"]


def test_a_learner_that_diverges_is_refused(update):
    with np.errstate(all="ignore"), pytest.raises(NumericalError, match=r"Q-function are not finite.*learning_rate"):
        update(DQL(learning_rate=1e38), 3)

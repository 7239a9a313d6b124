"""SAC's gradient steps: autograd in float64, numbers by hand, and what each setting does."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from metaloom.pipeline.algorithms.contract import NumericalError
from metaloom.pipeline.algorithms.off_policy.sac import METRICS
from metaloom.pipeline.algorithms.off_policy.settings import SAC
from metaloom.pipeline.seeding import generator
from metaloom.pipeline.types import Minibatch, Transitions

from .conftest import BOX, A, N, doubles, leaves, relu_network, same

SIZES: dict[str, Any] = {"critic_hidden_sizes": (6, 5)}
NAMES = {*METRICS, "gradient_steps", "learning_rate"}
TWINS = ("q1", "q2")


def sac(**settings):
    return SAC(**(SIZES | settings))


@pytest.fixture(params=["fused", "torch"])
def update(minibatches, request):
    """Gradient steps from the start; returns the learner before and after, and the metrics."""

    def run(settings, count=1, learner=None, batches=None, iteration=0, parallel=map):
        settings = settings.model_copy(update={"kernel": request.param})
        algorithm = settings.build(BOX)
        learner = learner or algorithm.initialize(run_seed=0)
        batches = minibatches(BOX, count) if batches is None else batches
        after, metrics = algorithm.update(learner, batches, run_seed=0, iteration=iteration, parallel=parallel)
        return learner, after, metrics

    return run


class Reference:
    """One gradient step as torch makes it, in float64 and with the same noise."""

    def __init__(self, learner, batch, settings):
        self.settings = settings
        self.policy, self.q = leaves(learner.params), leaves(learner.extra, "q")
        self.targets = leaves(learner.extra, "target_q")
        self.log_alpha = torch.tensor(float(learner.extra["log_alpha"]), dtype=torch.float64, requires_grad=True)
        noise = generator(0, "updates", 0).standard_normal((2 * N, A), np.float32)
        self.noise, self.following_noise = torch.tensor(noise, dtype=torch.float64).split(N)
        self.batch = doubles(batch.transitions)
        self.optimizers = [
            torch.optim.Adam(params, lr=settings.learning_rate, eps=1e-5)
            for params in ([self.log_alpha], self.q.values(), self.policy.values())
        ]

    def sample(self, observations, noise):
        outputs = relu_network(self.policy, "policy_network", observations)
        gaussian = torch.distributions.Normal(outputs[:, :A], outputs[:, A:].clamp(-20, 2).exp())
        u = gaussian.mean + gaussian.stddev * noise
        actions = torch.tanh(u)
        return actions, (gaussian.log_prob(u) - torch.log(1 - actions.square())).sum(-1)

    def values(self, params, prefix, observations, actions):
        inputs = torch.cat([observations, actions], 1)
        return [relu_network(params, f"{prefix}{twin}", inputs)[:, 0] for twin in TWINS]

    def descend(self, which, loss):
        optimizer = self.optimizers[which]
        optimizer.zero_grad()
        loss.backward()
        params = optimizer.param_groups[0]["params"]
        limit = self.settings.max_grad_norm if which else None
        norm = torch.nn.utils.clip_grad_norm_(params, limit or float("inf"))
        optimizer.step()
        return float(norm)

    def step(self):
        o, a, r, following, goes_on = self.batch
        actions, log_prob = self.sample(o, self.noise)
        with torch.no_grad():
            next_actions, next_log_prob = self.sample(following, self.following_noise)
        described = {"entropy": -log_prob.mean().item()}
        temperature_loss = -(self.log_alpha * (log_prob.detach() - A)).mean()
        described["temperature_loss"] = temperature_loss.item()
        if self.settings.learn_ent_coeff:
            self.descend(0, temperature_loss)
        alpha = self.log_alpha.exp().detach()
        with torch.no_grad():
            smaller = torch.minimum(*self.values(self.targets, "target_", following, next_actions))
            if self.settings.standardize_rew:
                r = (r - r.mean()) / r.std(correction=0)
            goals = self.settings.rew_scale * r + 0.9 * goes_on * (smaller - alpha * next_log_prob)
        q = self.values(self.q, "", o, a)
        q_loss = torch.stack([torch.nn.functional.mse_loss(one, goals) for one in q]).mean()
        described |= {"q_loss": q_loss.item(), "q_mean": (q[0] + q[1]).mean().item() / 2}
        described |= {"target_mean": goals.mean().item(), "temperature": alpha.item()}
        described["q_gradient_norm"] = self.descend(1, q_loss)
        policy_loss = (alpha * log_prob - torch.minimum(*self.values(self.q, "", o, actions))).mean()
        described |= {"policy_loss": policy_loss.item(), "gradient_norm": self.descend(2, policy_loss)}
        return described


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_grad_norm": None},
        {"max_grad_norm": 1e-3},
        {"learn_ent_coeff": False, "ent_coeff_init": 0.7},
        {"standardize_rew": True, "rew_scale": 3.0},
    ],
)
def test_a_step_is_the_one_that_torch_makes(update, minibatches, settings):
    settings = sac(learning_rate=1e-2, **settings)
    (batch,) = minibatches(BOX)
    # Targets are other networks than the Q-functions, as they are later in a run.
    learner = settings.build(BOX).initialize(run_seed=0)
    for name, value in learner.extra.items():
        if name.startswith("target_"):
            learner.extra[name] = value * np.float32(1.1) + np.float32(0.05)
    _, after, metrics = update(settings, batches=[batch], learner=learner)
    reference = Reference(learner, batch, settings)
    described = reference.step()
    assert {name: metrics[name] for name in described} == pytest.approx(described, rel=1e-4, abs=1e-5)
    assert set(described) == set(METRICS)
    assert after.extra["log_alpha"] == pytest.approx(reference.log_alpha.item(), rel=1e-5)
    for name, value in reference.policy.items():
        np.testing.assert_allclose(after.params[name], value.detach(), rtol=1e-3, atol=1e-4, err_msg=name)
    for name, value in reference.q.items():
        np.testing.assert_allclose(after.extra[name], value.detach(), rtol=1e-3, atol=1e-4, err_msg=name)
        target = 0.995 * learner.extra[f"target_{name}"] + 0.005 * after.extra[name]
        np.testing.assert_allclose(after.extra[f"target_{name}"], target, rtol=1e-5, atol=1e-7)


def test_at_the_start_the_two_q_functions_differ_and_targets_equal_them():
    learner = sac().build(BOX).initialize(run_seed=0)
    for name, value in learner.extra.items():
        if name.startswith("q1.") and name.endswith("kernel"):
            assert (value != learner.extra[name.replace("q1", "q2")]).all()
        if name.startswith(TWINS):
            np.testing.assert_array_equal(value, learner.extra[f"target_{name}"])
    assert float(np.exp(learner.extra["log_alpha"])) == pytest.approx(0.2)
    assert learner.params["policy_network.output.kernel"].shape[1] == 2 * A


def constant_learner(algorithm, targets):
    """Target networks that have one value each, and a policy whose standard deviation is nearly 0."""
    learner = algorithm.initialize(run_seed=0)
    for twin, value in zip(TWINS, targets, strict=True):
        learner.extra[f"target_{twin}.output.kernel"] *= 0
        learner.extra[f"target_{twin}.output.bias"] = np.full(1, value, np.float32)
    return learner


def test_the_end_of_a_task_has_no_future_but_a_time_limit_has_by_hand(update, minibatches):
    # The smaller target is 2; with α = 1e-6 entropy weighs nothing. Only terminated transitions lack 0.9 * 2; one that
    # a time limit ended is not terminated.
    settings = sac(ent_coeff_init=1e-6, learn_ent_coeff=False)
    learner = constant_learner(settings.build(BOX), (2, 5))
    (batch,) = minibatches(BOX)
    t = replace(batch.transitions, rewards=np.ones((1, N), np.float32))
    for terminated, expected in ((t.terminated, 1 + 0.9 * 2 * 6 / 8), (~t.terminated, 1 + 0.9 * 2 * 2 / 8)):
        _, _, metrics = update(settings, learner=learner, batches=[Minibatch(replace(t, terminated=terminated))])
        assert metrics["target_mean"] == pytest.approx(expected, rel=1e-4)


def test_rewards_are_scaled_after_they_were_standardized(update, minibatches):
    (batch,) = minibatches(BOX)
    t = batch.transitions
    ended = np.ones((1, N), bool)
    shifted = Minibatch(replace(t, rewards=10 * t.rewards + 7, terminated=ended))
    plain = Minibatch(replace(t, terminated=ended))
    # Where everything has ended the goals are the rewards as they are learned.
    assert update(sac(rew_scale=3.0), batches=[plain])[2]["target_mean"] == pytest.approx(
        3 * t.rewards.mean(), rel=1e-5
    )
    results = [update(sac(standardize_rew=True, rew_scale=3.0), batches=[x]) for x in (plain, shifted)]
    assert results[0][2]["target_mean"] == pytest.approx(0, abs=1e-5)
    assert results[0][2]["q_loss"] == pytest.approx(results[1][2]["q_loss"], rel=1e-4)


@pytest.mark.parametrize(("bias", "rises"), [(-8.0, True), (0.5, False)])
def test_the_temperature_rises_where_entropy_is_too_small_and_falls_where_it_is_too_large(update, bias, rises):
    learner = sac().build(BOX).initialize(run_seed=0)
    learner.params["policy_network.output.bias"] = np.array([0, 0, bias, bias], np.float32)
    _, after, metrics = update(sac(), learner=learner)
    assert (metrics["entropy"] < -A) == rises
    assert (after.extra["log_alpha"] > learner.extra["log_alpha"]) == rises
    assert metrics["temperature"] == pytest.approx(float(np.exp(after.extra["log_alpha"])))
    _, fixed, _ = update(sac(learn_ent_coeff=False), learner=learner)
    assert fixed.extra["log_alpha"] == learner.extra["log_alpha"]


def test_targets_move_by_one_minus_tau_at_every_interval_of_the_run(update):
    settings = sac(tau=0.9, target_update_intvl=2)
    learner = settings.build(BOX).initialize(run_seed=0)
    name = "q1.output.kernel"
    for steps_before in range(4):
        before, learner, _ = update(settings, learner=learner)
        old, new = before.extra[f"target_{name}"], learner.extra[f"target_{name}"]
        if steps_before % 2:
            np.testing.assert_allclose(new, 0.9 * old + 0.1 * learner.extra[name], rtol=1e-5)
        else:
            np.testing.assert_array_equal(new, old)
    _, hard, _ = update(sac(tau=0.0))
    np.testing.assert_array_equal(hard.extra[f"target_{name}"], hard.extra[name])


def test_the_same_twice_with_threads_or_without_and_nothing_given_is_changed(update):
    learner = sac().build(BOX).initialize(run_seed=0)
    _, first, metrics = update(sac(), 4, learner)
    _, second, _ = update(sac(), 4, learner)
    with ThreadPoolExecutor(2) as pool:
        _, threaded, _ = update(sac(), 4, learner, parallel=pool.map)
    assert same(first, second)
    assert same(first, threaded)
    assert same(learner, sac().build(BOX).initialize(run_seed=0))
    assert set(metrics) == NAMES
    assert all(np.isfinite(value) for value in metrics.values())
    assert not same(first, update(sac(), 4, learner, iteration=1)[1])  # other noise


def test_counters_count_iterations_and_gradient_steps(update):
    _, learner, metrics = update(sac(), 4)
    _, learner, _ = update(sac(), 2, learner)
    assert metrics["gradient_steps"] == 4
    assert int(learner.extra["num_updates"]) == 2
    assert int(learner.extra["num_gradient_steps"]) == 6
    assert int(learner.optimizer["q.step_count"]) == 6


def test_an_iteration_without_gradient_steps_has_the_same_metrics_without_values(update):
    before, after, metrics = update(sac(), 0)
    assert set(metrics) == NAMES
    assert metrics["gradient_steps"] == 0
    assert metrics["learning_rate"] == 3e-4
    assert all(np.isnan(metrics[name]) for name in METRICS)
    assert all(np.array_equal(after.params[name], value) for name, value in before.params.items())


def test_what_acts_is_the_policys_network():
    algorithm = sac().build(BOX)
    learner = algorithm.initialize(run_seed=0)
    acting = algorithm.acting_params(learner, 3).params
    assert set(acting) == set(learner.params)
    assert all(name.startswith("policy_network.") for name in acting)
    np.testing.assert_array_equal(
        acting["policy_network.output.kernel"][2], learner.params["policy_network.output.kernel"]
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"learning_rate": 1e-3},
        {"max_grad_norm": 1e-3},
        {"target_update_intvl": 2},
        {"tau": 0.9},
        {"ent_coeff_init": 0.3},
        {"learn_ent_coeff": False},
        {"rew_scale": 2.0},
        {"standardize_rew": True},
        {"lr_schedule": "exponential", "lr_decay": 0.5},
        {"lr_schedule": "linear", "lr_horizon": 3},
    ],
)
def test_every_setting_of_an_update_matters(update, changes):
    def two_iterations(settings):
        _, learner, _ = update(settings, 3)
        return update(settings, 3, learner)[1]

    assert not same(two_iterations(sac()), two_iterations(sac(**changes)))


def test_sizes_of_the_q_functions_are_those_that_are_asked_for():
    learner = sac(critic_hidden_sizes=(7,)).build(BOX).initialize(run_seed=0)
    assert learner.extra["q1.hidden_0.kernel"].shape[1] == 7
    assert "q1.hidden_1.kernel" not in learner.extra


def test_the_policy_learns_the_action_that_pays():
    # Episodes of one step with reward -(a - 0.5)², summed over dimensions: the mean action comes from 0 to near 0.5.
    rng = np.random.default_rng(0)
    settings = sac(learning_rate=3e-3, critic_hidden_sizes=(32, 32), ent_coeff_init=1e-3, learn_ent_coeff=False)
    algorithm = settings.build(BOX)
    learner = algorithm.initialize(run_seed=0)
    observations = np.ones((1, 64, 3), np.float32)

    def batch():
        actions = rng.uniform(-1, 1, (1, 64, A)).astype(np.float32)
        rewards = -np.square(actions - 0.5).sum(-1)
        return Minibatch(Transitions(observations, actions, rewards, observations, np.ones((1, 64), bool)))

    learner, _ = algorithm.update(learner, [batch() for _ in range(600)], run_seed=0, iteration=0)
    outputs = relu_network(leaves(learner.params), "policy_network", torch.ones(1, 3, dtype=torch.float64))
    np.testing.assert_allclose(outputs.tanh().detach()[0, :A], 0.5, atol=0.15)


def test_a_learner_that_diverges_is_refused(update):
    with np.errstate(all="ignore"), pytest.raises(NumericalError, match=r"policy are not finite.*learning_rate"):
        update(sac(learning_rate=1e38), 3)

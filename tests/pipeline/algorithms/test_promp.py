"""Every option of ProMP does what it says, and contradictions are refused."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from pydantic import ValidationError

from metaloom.pipeline.algorithms.contract import NUM_UPDATES, Setup
from metaloom.pipeline.algorithms.maml.meta_gradient import LOG_INNER_LR, meta_gradient
from metaloom.pipeline.algorithms.maml.promp import INNER_KL_COEFF, adapted_kl_coeff
from metaloom.pipeline.algorithms.maml.rows import build_chunks
from metaloom.pipeline.algorithms.maml.settings import ProMP
from metaloom.pipeline.baselines import BaselineConfig
from metaloom.pipeline.config.input import ConfigError
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


def optimize(promp, steps, learner=None, *, policy=POLICY, run_seed=0, iteration=0):
    learner = learner or build(promp, policy).initialize(run_seed=1)
    return build(promp, policy).update(learner, steps, run_seed=run_seed, iteration=iteration)


def distance(a: LearnerState, b: LearnerState) -> float:
    return max(abs(a.params[name] - b.params[name]).max() for name in a.params)


@pytest.mark.parametrize(
    "changed",
    [
        {"inner_lr": 1.0},
        {"clip_eps": 0.01},
        {"outer_lr": 1e-2},
        {"num_epochs": 2},
        {"num_minibatches": 2},
        {"tolerance": 10.0},
        {"init_inner_kl_penalty": 50.0},
        {"trainable_inner_lr": True, "num_epochs": 2, "outer_lr": 0.5},
        {"first_order": True},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_every_option_changes_the_learner(random_steps, changed):
    steps = random_steps(2)
    base = {name: changed[name] for name in ("num_epochs", "outer_lr") if len(changed) > 1}
    plain, _ = optimize(ProMP(**base), steps)
    other, _ = optimize(ProMP(**changed), steps)
    assert distance(plain, other) > 1e-5


def test_inner_steps_decides_the_number_of_rounds(random_steps):
    for inner_steps in (0, 1, 3):
        _, metrics = optimize(ProMP(inner_steps=inner_steps), random_steps(inner_steps + 1))
        assert ("inner_kl" in metrics) == (inner_steps > 0)
    with pytest.raises(ValueError, match=r"got samples of inner steps \[0, 1\]; expected \[0, 1, 2\]"):
        optimize(ProMP(inner_steps=2), random_steps(2))


def test_adapting_without_inner_steps_is_refused(random_steps):
    promp = build(ProMP(inner_steps=0))
    learner = promp.initialize(run_seed=0)
    with pytest.raises(ConfigError, match=r"algorithm\.inner_steps is 0, so no task adapts; it must be at least 1"):
        promp.adapt(learner, promp.acting_params(learner, 3), random_steps(1)[0])


def test_without_inner_steps_the_loss_is_the_clipped_surrogate_of_ppo(random_steps):
    steps = random_steps(1, ragged=False)
    promp = ProMP(inner_steps=0, clip_eps=0.1)
    learner = build(promp).initialize(run_seed=1)
    _, metrics = optimize(promp, steps, learner)
    p, episodes = {name: value.astype(np.float64) for name, value in learner.params.items()}, steps[0].episodes
    hidden = np.tanh(episodes.observations[:, :, :-1] @ p["mean_network.hidden_0.kernel"])
    mean = hidden @ p["mean_network.output.kernel"]

    def log_prob(mean, log_std):
        z = (episodes.actions - mean) / np.exp(log_std)
        return (-0.5 * z**2 - log_std).sum(-1)

    behavior_log_std = episodes.behavior["log_std"][:, None, None].astype(np.float64)
    ratio = np.exp(log_prob(mean, p["log_std"]) - log_prob(episodes.behavior["mean"], behavior_log_std))
    advantages = steps[0].samples.advantages
    expected = -np.minimum(ratio * advantages, np.clip(ratio, 0.9, 1.1) * advantages).mean()
    assert metrics["loss_before"] == pytest.approx(expected, rel=1e-4)


def test_more_adam_steps_lower_the_loss_further(random_steps):
    steps = random_steps(2)
    losses = [optimize(ProMP(num_epochs=n, outer_lr=0.01), steps)[1]["loss_after"] for n in (1, 5, 20)]
    assert losses[0] > losses[1] > losses[2]


def test_minibatches_make_one_adam_step_each(random_steps):
    updated, _ = optimize(ProMP(num_epochs=2, num_minibatches=3), random_steps(2))
    assert updated.optimizer[STEP_COUNT] == 6


def test_minibatches_are_drawn_from_run_seed_and_iteration(random_steps):
    promp, steps = ProMP(num_minibatches=2), random_steps(2)
    first, _ = optimize(promp, steps)
    again, _ = optimize(promp, steps)
    assert distance(first, again) == 0
    for position in ({"run_seed": 1}, {"iteration": 1}):
        other, _ = optimize(promp, steps, **position)
        assert distance(first, other) > 1e-6


def test_metrics_with_minibatches_are_those_of_all_samples(random_steps):
    steps = random_steps(2)
    whole, parts = (optimize(ProMP(num_minibatches=n), steps)[1] for n in (1, 2))
    assert parts["loss_before"] == whole["loss_before"]


def test_clip_eps_shrinks_by_the_anneal_factor_with_every_update(random_steps):
    promp, steps = ProMP(clip_eps=0.4, anneal_factor=0.5), random_steps(2)
    learner, seen = build(promp).initialize(run_seed=1), []
    for iteration in range(3):
        learner, metrics = optimize(promp, steps, learner, iteration=iteration)
        seen.append(metrics["clip_eps"])
    assert seen == pytest.approx([0.4, 0.2, 0.1])
    assert learner.extra[NUM_UPDATES] == 3


def test_the_annealed_clip_range_is_the_one_in_the_loss(random_steps):
    steps, promp = random_steps(2), ProMP(clip_eps=0.4, anneal_factor=0.5)
    learner = build(promp).initialize(run_seed=1)
    annealed = LearnerState(learner.params, learner.optimizer, learner.extra | {NUM_UPDATES: np.array(2)})
    _, late = optimize(promp, steps, annealed)
    _, narrow = optimize(ProMP(clip_eps=0.1), steps)
    assert late["loss_after"] == narrow["loss_after"]


@pytest.mark.parametrize(("target", "factor"), [(1e-4, 2), (1e4, 0.5)])
def test_the_adaptive_penalty_follows_the_kl(random_steps, target, factor):
    promp = ProMP(inner_steps=2, adaptive_inner_kl_penalty=True, target_inner_kl=target, init_inner_kl_penalty=0.01)
    updated, metrics = optimize(promp, random_steps(3))
    np.testing.assert_allclose(updated.extra[INNER_KL_COEFF], [0.01 * factor] * 2)
    assert metrics["inner_kl_coeff"] == pytest.approx(0.01)


def test_without_adaptation_the_penalty_stays(random_steps):
    updated, _ = optimize(ProMP(init_inner_kl_penalty=0.01), random_steps(2))
    np.testing.assert_array_equal(updated.extra[INNER_KL_COEFF], [0.01])


def test_the_penalty_is_the_mean_of_coefficient_times_kl_over_inner_steps(random_steps):
    steps = random_steps(3)
    free, dear = (optimize(ProMP(inner_steps=2, init_inner_kl_penalty=c), steps)[1] for c in (0.0, 3.0))
    # `inner_kl` is measured after the update; a negligible step makes it that of before.
    still = ProMP(inner_steps=2, outer_lr=1e-12)
    kl = optimize(still, steps)[1]["inner_kl"]
    assert dear["loss_before"] - free["loss_before"] == pytest.approx(3.0 * kl, rel=1e-4)


@pytest.mark.parametrize(
    ("kl", "coeff"), [(0.49, 0.125), (0.5, 0.25), (0.75, 0.25), (1.125, 0.25), (1.13, 0.5), (100.0, 0.5)]
)
def test_the_adaptive_penalty_stays_within_half_as_much_again_of_the_target(kl, coeff):
    assert adapted_kl_coeff(0.25, kl=kl, target=0.75) == coeff


def test_the_adaptive_penalty_is_bounded_on_both_sides():
    assert adapted_kl_coeff(1e-6, kl=0.0, target=0.01) == 1e-6
    assert adapted_kl_coeff(80.0, kl=1.0, target=0.01) == 100.0


def test_trainable_step_sizes_start_at_inner_lr_and_learn(random_steps):
    promp = ProMP(inner_steps=2, trainable_inner_lr=True, inner_lr=0.3, outer_lr=0.05)
    learner = build(promp).initialize(run_seed=1)
    sizes = {name: value for name, value in learner.extra.items() if name.startswith(LOG_INNER_LR)}
    assert {name.removeprefix(LOG_INNER_LR) for name in sizes} == set(learner.params)
    for name, value in sizes.items():
        assert value.shape == (2, *learner.params[name.removeprefix(LOG_INNER_LR)].shape)
        np.testing.assert_allclose(np.exp(value), 0.3, rtol=1e-6)
    updated, metrics = optimize(promp, random_steps(3), learner)
    moved = np.exp(updated.extra[LOG_INNER_LR + "log_std"])
    assert abs(moved - 0.3).max() > 1e-3
    assert (moved > 0).all()
    assert metrics["inner_lr"] != pytest.approx(0.3, rel=1e-4)


def test_adapt_uses_the_learned_step_size_of_its_inner_step(random_steps):
    promp, steps = ProMP(inner_steps=2, trainable_inner_lr=True), random_steps(2)
    learner = build(promp).initialize(run_seed=1)
    extra = dict(learner.extra)
    for name in learner.params:
        logs = extra[LOG_INNER_LR + name].copy()
        logs[1] = np.log(0.7)
        extra[LOG_INNER_LR + name] = logs
    learner = LearnerState(learner.params, learner.optimizer, extra)
    before = TaskParams.broadcast(learner.params, 3)
    found = build(promp).adapt(learner, before, steps[1])
    expected = build(ProMP(inner_steps=2, inner_lr=0.7)).adapt(learner_without_logs(learner), before, steps[1])
    for name in learner.params:
        np.testing.assert_allclose(found.params[name], expected.params[name], rtol=1e-5, atol=1e-6)


def learner_without_logs(learner):
    extra = {name: value for name, value in learner.extra.items() if not name.startswith(LOG_INNER_LR)}
    return LearnerState(learner.params, learner.optimizer, extra)


def test_any_optimizer_of_torch_takes_the_steps(random_steps):
    steps = random_steps(2)
    sgd = ProMP(num_epochs=1, optimizer="sgd", outer_lr=0.5)
    learner = build(sgd).initialize(run_seed=1)
    gradients, *_ = meta_gradient(build(sgd).problem(learner, steps), learner.params, build_chunks(steps, 2))
    updated, _ = optimize(sgd, steps, learner)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(updated.params[name], learner.params[name] - 0.5 * gradient, rtol=1e-6, atol=1e-7)

    for optimizer in ("Adagrad", {"name": "AdamW", "options": {"weight_decay": 0.5}}):
        promp = ProMP(optimizer=optimizer, trainable_inner_lr=True)
        learner = build(promp).initialize(run_seed=1)
        once, _ = optimize(promp, steps, learner)
        twice, _ = optimize(promp, steps, once)
        assert learner.optimizer.keys() == once.optimizer.keys()
        assert twice.optimizer[STEP_COUNT] == 10
        assert distance(once, twice) > 1e-4


def test_a_schedule_multiplies_the_step_size_by_the_count_of_updates(random_steps):
    steps = random_steps(2)
    falling = ProMP(num_epochs=1, outer_lr=0.1, lr_schedule="linear", lr_horizon=2)
    state, rates = build(falling).initialize(run_seed=1), []
    for iteration in range(3):
        before = state
        state, metrics = optimize(falling, steps, state, iteration=iteration)
        rates.append(metrics["outer_lr"])
    assert rates == pytest.approx([0.1, 0.05, 0])
    assert distance(before, state) == 0
    with pytest.raises(ConfigError, match="missing 1 required positional argument: 'T_max'"):
        build(ProMP(lr_schedule="CosineAnnealingLR"))


def test_what_version_0_1_did_not_have_does_not_count_in_a_digest():
    assert not {"kernel", "optimizer", "lr_schedule", "lr_decay", "lr_horizon"} & ProMP().decisive().keys()


def test_steps_after_those_of_training_repeat_the_last_step_size(random_steps):
    promp = build(ProMP(inner_steps=2, trainable_inner_lr=True))
    state, step = promp.initialize(run_seed=1), random_steps(1)[0]
    for log in (log for log in state.extra.values() if log.ndim):
        log[1] += 1
    params = promp.acting_params(state, 3)
    first, second, fourth = (promp.adapt(state, params, replace(step, k=k)).params for k in (0, 1, 3))
    assert all(np.array_equal(second[name], fourth[name]) for name in params.params)
    assert not all(np.array_equal(first[name], second[name]) for name in params.params)


def test_there_is_no_kernel_but_torch():
    assert build(ProMP()).kernel.name == build(ProMP(kernel="torch")).kernel.name == "torch"
    with pytest.raises(ConfigError, match="the whole update is differentiated by torch"):
        build(ProMP(kernel="fused"))


def test_a_fixed_standard_deviation_stays(random_steps):
    policy = GaussianPolicy(Spaces((3,), 1.0, 2, 0), PolicyConfig(hidden_sizes=(4,), learn_std=False, init_std=0.7))
    promp, steps = ProMP(outer_lr=0.1), random_steps(2)
    learner = build(promp, policy).initialize(run_seed=1)
    adapted = build(promp, policy).adapt(learner, TaskParams.broadcast(learner.params, 3), steps[0])
    updated, _ = optimize(promp, steps, learner, policy=policy)
    np.testing.assert_array_equal(adapted.params["log_std"], np.broadcast_to(learner.params["log_std"], (3, 2)))
    np.testing.assert_array_equal(updated.params["log_std"], learner.params["log_std"])
    assert list(updated.params) == list(learner.params)
    assert not any("log_std" in name for name in updated.optimizer)


def test_initialization_depends_on_the_run_seed_alone():
    first, again, other = (build(ProMP()).initialize(run_seed=seed) for seed in (3, 3, 4))
    assert distance(first, again) == 0
    assert distance(first, other) > 0.1


def test_inputs_are_left_alone(random_steps):
    promp, steps = ProMP(trainable_inner_lr=True), random_steps(2)
    learner = build(promp).initialize(run_seed=1)
    groups = (learner.params, learner.optimizer, learner.extra)
    for group in groups:
        for value in group.values():
            value.flags.writeable = False
    copies = [{name: value.copy() for name, value in group.items()} for group in groups]
    build(promp).adapt(learner, TaskParams.broadcast(learner.params, 3), steps[0])
    optimize(promp, steps, learner)
    for group, copy in zip(groups, copies, strict=True):
        assert list(group) == list(copy)
        assert all(np.array_equal(group[name], copy[name]) for name in copy)


def test_state_keeps_names_shapes_and_dtypes_from_update_to_update(random_steps):
    promp = ProMP(inner_steps=2, trainable_inner_lr=True, adaptive_inner_kl_penalty=True)
    learner = build(promp).initialize(run_seed=1)
    updated, _ = optimize(promp, random_steps(3), learner)
    for group in ("params", "optimizer", "extra"):
        old, new = getattr(learner, group), getattr(updated, group)
        assert {k: (type(v), v.shape, v.dtype) for k, v in new.items()} == {
            k: (type(v), v.shape, v.dtype) for k, v in old.items()
        }


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"inner_steps": 0, "trainable_inner_lr": True}, "trainable_inner_lr is on"),
        ({"inner_steps": 0, "first_order": True}, "first_order is on"),
        ({"inner_steps": 0, "adaptive_inner_kl_penalty": True}, "there is no inner-step KL"),
        ({"adaptive_inner_kl_penalty": True, "init_inner_kl_penalty": 0}, "use a positive value"),
        ({"target_inner_kl": 0.02}, "turn it on"),
        ({"clip_eps": 0}, "greater than 0"),
        ({"anneal_factor": 1.1}, "less than or equal to 1"),
        ({"inner_steps": -1}, "greater than or equal to 0"),
        ({"num_epochs": 0}, "greater than or equal to 1"),
        ({"alpha": 1}, "unknown key"),
        ({"name": "ppo"}, "promp"),
    ],
)
def test_impossible_and_contradictory_settings_are_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        ProMP(**settings)


def test_configuration_is_read_without_importing_torch():
    code = "import sys, metaloom.pipeline.config.run; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

"""MAML-VPG, MAML-PPO and E-MAML: meta-gradients, identities, options."""

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from metaloom.pipeline.algorithms.contract import Setup
from metaloom.pipeline.algorithms.maml.learner import step_size_logs
from metaloom.pipeline.algorithms.maml.meta_gradient import (
    LOG_INNER_LR,
    likelihood_ratio_loss,
    log_likelihood_loss,
    meta_gradient,
    meta_objective,
)
from metaloom.pipeline.algorithms.maml.policy_gradient import exploration_credit
from metaloom.pipeline.algorithms.maml.rows import build_chunks
from metaloom.pipeline.algorithms.maml.settings import EMAML, MAMLPPO, MAMLTRPO, MAMLVPG, ProMP
from metaloom.pipeline.baselines import BaselineConfig
from metaloom.pipeline.config.run import RunConfig, build_config, build_stored
from metaloom.pipeline.envs.config import EnvConfig
from metaloom.pipeline.estimation.config import ProcessingConfig
from metaloom.pipeline.nn.spec import Spaces
from metaloom.pipeline.policies import PolicyConfig
from metaloom.pipeline.policies.build import GaussianPolicy
from metaloom.pipeline.types import LearnerState, TaskParams

DOCS = Path(__file__).parents[3] / "docs" / "algorithms"
POLICY = GaussianPolicy(Spaces((3,), 1.0, 2, 0), PolicyConfig(hidden_sizes=(4,)))


def build(settings, policy=POLICY):
    sizes = ((3,), 1.0, policy.action_size, 0, "toy", 5)
    return settings.build(Setup(*sizes, policy.config, BaselineConfig(), ProcessingConfig(), "cpu", np.negative))


FAMILY = [
    MAMLVPG(inner_lr=0.3),
    MAMLVPG(inner_lr=0.3, inner_loss="likelihood_ratio"),
    MAMLVPG(inner_lr=0.3, inner_steps=2),
    MAMLVPG(inner_lr=0.3, inner_steps=2, exploration=True),
    MAMLVPG(inner_lr=0.3, inner_steps=2, exploration=True, exploration_rounds="first"),
    MAMLVPG(inner_lr=0.3, exploration=True, e_maml_scale="sum"),
    MAMLVPG(inner_lr=0.3, trainable_inner_lr=True),
    MAMLVPG(inner_steps=0),
    MAMLPPO(inner_lr=0.3),
    MAMLPPO(inner_lr=0.3, inner_steps=2, clip_eps=0.1),
    MAMLPPO(inner_lr=0.3, trainable_inner_lr=True),
    MAMLTRPO(inner_lr=0.3),
    MAMLTRPO(inner_lr=0.3, inner_loss="likelihood_ratio", inner_steps=2),
    EMAML(inner_lr=0.3),
    EMAML(inner_lr=0.3, inner_steps=2, e_maml_scale="sum"),
]


def describe(algorithm):
    changed = {name: getattr(algorithm, name) for name in sorted(algorithm.model_fields_set - {"inner_lr"})}
    return " ".join([algorithm.name, *(f"{name}={value}" for name, value in changed.items())])


def optimize(algorithm, steps, learner=None):
    learner = learner or build(algorithm).initialize(run_seed=1)
    return build(algorithm).update(learner, steps, run_seed=0, iteration=0)


def distance(a, b):
    return max(abs(a.params[name] - b.params[name]).max() for name in a.params)


def in_float64(algorithm, steps):
    learner = build(algorithm).initialize(run_seed=0)
    meta_params = {k: v.astype(np.float64) for k, v in (learner.params | step_size_logs(learner.extra)).items()}
    return build(algorithm).problem(learner, steps), meta_params, build_chunks(steps, 2, dtype=torch.float64)


@pytest.mark.parametrize("algorithm", FAMILY, ids=describe)
def test_meta_gradient_agrees_with_central_differences(random_steps, algorithm):
    problem, meta_params, chunks = in_float64(algorithm, random_steps(algorithm.inner_steps + 1))
    gradients, *_ = meta_gradient(problem, meta_params, chunks)
    assert list(gradients) == list(meta_params)
    rng = np.random.default_rng(0)

    def loss(name, index, shift):
        moved = {key: value.copy() for key, value in meta_params.items()}
        moved[name][index] += shift
        return meta_objective(problem, moved, chunks)["loss"].mean()

    for name, gradient in gradients.items():
        for _ in range(3):
            index = tuple(rng.integers(0, n) for n in gradient.shape)
            expected = (loss(name, index, 1e-6) - loss(name, index, -1e-6)) / 2e-6
            assert gradient[index] == pytest.approx(expected, rel=1e-5, abs=1e-8), (name, index)


def test_a_linear_policy_adapts_by_the_policy_gradient_written_out(random_steps):
    linear = GaussianPolicy(Spaces((3,), 1.0, 2, 0), PolicyConfig(hidden_sizes=()))
    learner = build(MAMLVPG(inner_lr=0.3), linear)
    state = learner.initialize(run_seed=0)
    assert {name: value.shape for name, value in state.params.items()} == {
        "mean_network.output.kernel": (3, 2),
        "mean_network.output.bias": (2,),
        "log_std": (2,),
    }
    (step,) = random_steps(1)
    adapted = learner.adapt(state, learner.acting_params(state, 3), step)
    for b, real in enumerate(step.episodes.mask != 0):
        x, a = step.episodes.observations[b, :, :-1][real], step.episodes.actions[b][real]
        weights = 0.3 * step.samples.advantages[b][real][:, None] / real.sum()
        # The score of a Gaussian with standard deviation 1.
        off = a - x @ state.params["mean_network.output.kernel"]
        expected = {
            "mean_network.output.kernel": x.T @ (weights * off),
            "mean_network.output.bias": (weights * off).sum(0),
            "log_std": (weights * (off**2 - 1)).sum(0),
        }
        for name, change in expected.items():
            assert np.abs(change).max() > 1e-3
            np.testing.assert_allclose(adapted.params[name][b] - state.params[name], change, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("algorithm", [MAMLVPG(), MAMLPPO(), MAMLTRPO(), EMAML()], ids=describe)
def test_where_the_policy_acted_all_kls_are_zero(on_policy_steps, algorithm):
    learner = build(algorithm).initialize(run_seed=0)
    steps = on_policy_steps(build(algorithm), learner)
    values = meta_objective(build(algorithm).problem(learner, steps), learner.params, build_chunks(steps, 2))
    for name in ("inner_kl_0", "outer_kl"):
        np.testing.assert_allclose(values[name], 0, atol=1e-6, err_msg=name)
    if isinstance(algorithm, MAMLTRPO | MAMLPPO):
        means = [s[m == 1].mean() for s, m in zip(steps[1].samples.advantages, steps[1].samples.mask, strict=True)]
        np.testing.assert_allclose(values["loss"], np.negative(means), atol=1e-6)


def test_inner_losses_differ_in_second_order_by_advantage_times_score_outer_product(on_policy_steps):
    algorithm = MAMLTRPO(inner_steps=0)
    learner = build(algorithm).initialize(run_seed=0)
    steps = on_policy_steps(build(algorithm), learner, B=1)
    (chunk,) = build_chunks(steps, 1, dtype=torch.float64)
    params = {name: value.astype(np.float64) for name, value in learner.params.items()}
    with torch.no_grad():
        leaves = [torch.tensor(value[None]) for value in params.values()]
        acted = POLICY.distribution(dict(zip(params, leaves, strict=True)), chunk.rounds[0].observations)
    rows = dataclasses.replace(
        chunk.rounds[0], behavior=acted, behavior_log_prob=acted.log_prob(chunk.rounds[0].actions)
    )

    def log_prob(vector):
        sizes, shapes = [value.size for value in params.values()], [value.shape for value in params.values()]
        parts = [part.reshape(1, *shape) for part, shape in zip(vector.split(sizes), shapes, strict=True)]
        return POLICY.distribution(dict(zip(params, parts, strict=True)), rows.observations), None

    vector = torch.cat([leaf.ravel() for leaf in leaves])
    gradients, hessians = [], []
    for loss in (likelihood_ratio_loss, log_likelihood_loss):

        def value(v, loss=loss):
            return loss(log_prob(v)[0], rows).sum()

        gradients.append(torch.autograd.functional.jacobian(value, vector))
        hessians.append(torch.autograd.functional.hessian(value, vector))
    scores = torch.autograd.functional.jacobian(lambda v: log_prob(v)[0].log_prob(rows.actions)[0], vector)
    weights = (rows.advantages * rows.weights)[0]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(
        hessians[0] - hessians[1], -scores.T @ (weights[:, None] * scores), rtol=1e-8, atol=1e-10
    )
    assert (hessians[0] - hessians[1]).abs().max() > 1e-3


def with_rewards(step, rewards):
    return dataclasses.replace(step, episodes=dataclasses.replace(step.episodes, rewards=rewards.astype(np.float32)))


def test_credit_has_zero_mean_and_unit_deviation_over_the_steps_of_all_tasks(random_steps):
    steps = random_steps(2, ragged=True)
    mask = steps[1].samples.mask
    # Whatever stands on padding is not to count.
    steps[1] = with_rewards(steps[1], np.where(mask == 1, steps[1].episodes.rewards + 3, 99))
    credit = exploration_credit(steps)
    real = steps[1].episodes.rewards[mask == 1]
    for b in range(3):
        own = steps[1].episodes.rewards[b][mask[b] == 1]
        assert credit[b] == pytest.approx((own.mean() - real.mean()) / real.std(), rel=1e-5)
    assert np.average(credit, weights=mask.sum((1, 2))) == pytest.approx(0, abs=1e-6)


def test_rewards_of_earlier_rounds_earn_no_credit(random_steps):
    steps = random_steps(2)
    other = [with_rewards(steps[0], steps[0].episodes.rewards + 1), steps[1]]
    np.testing.assert_array_equal(exploration_credit(steps), exploration_credit(other))


def test_the_exploration_term_is_credit_times_log_likelihood_before_adaptation(random_steps):
    steps = random_steps(3)
    losses = {}
    settings = {
        "none": {},
        "all": {"exploration": True},
        "first": {"exploration": True, "exploration_rounds": "first"},
        "sum": {"exploration": True, "e_maml_scale": "sum"},
    }
    for name, own in settings.items():
        problem, params, chunks = in_float64(MAMLVPG(inner_steps=2, **own), steps)
        losses[name] = meta_objective(problem, params, chunks)["loss"]
    seen = []

    def recorded(current, chunk):
        means = [
            rows.mean(now.log_prob(rows.actions)).detach() for now, rows in zip(current, chunk.rounds, strict=True)
        ]
        seen.append(torch.stack(means))
        return {"loss": means[0]}

    meta_objective(dataclasses.replace(problem, objective=recorded), params, chunks)
    log_likelihoods = torch.cat(seen, dim=1).numpy()
    credit = exploration_credit(steps)
    np.testing.assert_allclose(losses["first"] - losses["none"], -credit * log_likelihoods[0], rtol=1e-9)
    np.testing.assert_allclose(losses["all"] - losses["none"], -credit * log_likelihoods[:2].sum(0), rtol=1e-9)
    np.testing.assert_allclose(losses["sum"] - losses["none"], 2 * (losses["all"] - losses["none"]), rtol=1e-9)


@pytest.mark.parametrize(
    ("changed", "base"),
    [
        ({"inner_lr": 1.0}, {}),
        ({"inner_loss": "likelihood_ratio"}, {}),
        ({"outer_lr": 1e-2}, {}),
        ({"num_epochs": 2}, {}),
        ({"num_minibatches": 2}, {}),
        ({"tolerance": 10.0}, {"num_epochs": 4}),
        ({"target_kl": 1e-9}, {"num_epochs": 4}),
        ({"max_grad_norm": 1e-9}, {}),
        ({"first_order": True}, {}),
        ({"trainable_inner_lr": True}, {"num_epochs": 2, "outer_lr": 0.5}),
        ({"exploration": True}, {}),
        ({"e_maml_scale": "sum"}, {"exploration": True, "num_epochs": 3}),
        ({"exploration_rounds": "first"}, {"exploration": True, "inner_steps": 2}),
    ],
    ids=lambda settings: ", ".join(f"{name}={value}" for name, value in settings.items()),
)
def test_every_option_of_maml_vpg_changes_the_learner(random_steps, changed, base):
    steps = random_steps(base.get("inner_steps", 1) + 1)
    plain, other = (optimize(MAMLVPG(**settings), steps)[0] for settings in (base, base | changed))
    assert distance(plain, other) > 1e-5


@pytest.mark.parametrize(
    ("changed", "base"),
    [
        ({"inner_lr": 1.0}, {}),
        ({"clip_eps": 5.0}, {}),
        ({"inner_loss": "clipped"}, {"clip_eps": 0.01, "outer_lr": 0.05}),
        ({"outer_lr": 1e-2}, {}),
        ({"num_epochs": 1}, {}),
        ({"num_minibatches": 2}, {}),
        ({"tolerance": 10.0}, {}),
        ({"first_order": True}, {}),
        ({"trainable_inner_lr": True}, {"outer_lr": 0.5}),
    ],
    ids=lambda settings: ", ".join(f"{name}={value}" for name, value in settings.items()),
)
def test_every_option_of_maml_ppo_changes_the_learner(random_steps, changed, base):
    steps = random_steps(2)
    plain, other = (optimize(MAMLPPO(**settings), steps)[0] for settings in (base, base | changed))
    assert distance(plain, other) > 1e-5


@pytest.mark.parametrize("algorithm", [MAMLVPG, MAMLPPO, MAMLTRPO, EMAML], ids=lambda cls: cls.__name__)
def test_inner_steps_decides_the_number_of_rounds(random_steps, algorithm):
    for inner_steps in (1, 3):
        optimize(algorithm(inner_steps=inner_steps), random_steps(inner_steps + 1))
    with pytest.raises(ValueError, match=r"got samples of inner steps \[0, 1\]; expected \[0, 1, 2\]"):
        optimize(algorithm(inner_steps=2), random_steps(2))


def test_on_policy_a_ppo_step_is_that_of_the_unclipped_ratio(on_policy_steps):
    algorithm = MAMLPPO()
    learner = build(algorithm).initialize(run_seed=0)
    (step, _) = on_policy_steps(build(algorithm), learner)
    before = TaskParams.broadcast(learner.params, 3)
    clipped = build(algorithm).adapt(learner, before, step)
    plain = build(MAMLTRPO(inner_loss="likelihood_ratio")).adapt(learner, before, step)
    for name in learner.params:
        np.testing.assert_allclose(clipped.params[name], plain.params[name], rtol=1e-5, atol=1e-6)


def test_ppo_clips_after_adaptation_and_before_it_only_when_asked(on_policy_steps):
    algorithm = MAMLPPO(clip_eps=0.05, outer_lr=0.05)
    learner = build(algorithm).initialize(run_seed=0)
    steps = on_policy_steps(build(algorithm), learner)
    updated, metrics = optimize(algorithm, steps, learner)
    assert metrics["clip_fraction"] > 0.2
    moved = LearnerState(updated.params, updated.optimizer, updated.extra)
    before = TaskParams.broadcast(moved.params, 3)

    def adapted(**settings):
        return build(MAMLPPO(**settings)).adapt(moved, before, steps[0]).params

    unclipped, tight = adapted(clip_eps=100.0), adapted(clip_eps=0.05)
    assert all(np.array_equal(tight[name], unclipped[name]) for name in tight)
    clipped = adapted(clip_eps=0.05, inner_loss="clipped")
    assert max(abs(clipped[name] - unclipped[name]).max() for name in clipped) > 1e-4


def test_one_update_of_maml_ppo_stays_where_its_samples_are_unless_the_inner_loss_is_clipped(on_policy_steps):
    def outer_kl(**settings):
        algorithm = MAMLPPO(inner_lr=1.0, outer_lr=0.01, clip_eps=0.1, **settings)
        learner = build(algorithm).initialize(run_seed=0)
        return optimize(algorithm, on_policy_steps(build(algorithm), learner, E=10, T=20), learner)[1]["outer_kl"]

    assert outer_kl() < 0.01
    assert outer_kl(inner_loss="clipped") > 0.05
    assert outer_kl(inner_loss="clipped", num_epochs=1) < 0.01


def test_runs_of_maml_ppo_from_before_the_setting_stay_clipped_with_their_digest():
    stored = RunConfig(env=EnvConfig(name="point-corner"), algorithm=MAMLPPO()).model_dump(mode="json")
    del stored["algorithm"]["inner_loss"]
    earlier, fresh = build_stored(stored), build_config(stored)
    assert earlier.algorithm.inner_loss == "clipped"
    assert fresh.algorithm.inner_loss == "likelihood_ratio"
    assert "inner_loss" not in earlier.algorithm.decisive()
    assert earlier.digest() != fresh.digest()


@pytest.mark.parametrize("algorithm", [MAMLVPG, MAMLPPO], ids=lambda cls: cls.__name__)
def test_meta_sgd_trains_the_step_sizes(random_steps, algorithm):
    trained = algorithm(trainable_inner_lr=True, inner_steps=2, outer_lr=0.1)
    updated, metrics = optimize(trained, random_steps(3))
    for name in updated.params:
        assert abs(updated.extra[LOG_INNER_LR + name] - np.float32(np.log(0.1))).max() > 1e-3
    assert metrics["inner_lr"] != pytest.approx(0.1, rel=1e-4)


def test_epochs_end_when_the_loss_settles(random_steps):
    steps, settings = random_steps(2), {"outer_lr": 0.05, "num_epochs": 12}
    losses = [optimize(MAMLPPO(**settings | {"num_epochs": n}), steps)[1]["loss_after"] for n in range(1, 13)]
    _, free = optimize(MAMLPPO(**settings), steps)
    changes = np.abs(np.diff([free["loss_before"], *losses]))
    tolerance = float(np.median(changes))
    _, metrics = optimize(MAMLPPO(**settings, tolerance=tolerance), steps)
    assert metrics["epochs"] == np.argmax(changes < tolerance) + 1
    assert 1 < metrics["epochs"] < 12
    assert metrics["loss_after"] == losses[int(metrics["epochs"]) - 1]
    assert "epochs" not in free


def test_no_step_follows_one_that_moves_adapted_policies_further_than_the_target_kl(on_policy_steps):
    settings = {"outer_lr": 0.01, "num_epochs": 6}
    learner = build(MAMLPPO(**settings)).initialize(run_seed=0)
    steps = on_policy_steps(build(MAMLPPO(**settings)), learner)
    runs = [optimize(MAMLPPO(**settings | {"num_epochs": n}), steps, learner) for n in range(1, 7)]
    kls = [metrics["outer_kl"] for _, metrics in runs]
    assert kls == sorted(kls)  # so each number of steps has its range of limits
    for taken, limit in ((1, kls[0] / 2), (3, (kls[1] + kls[2]) / 2), (6, kls[5])):
        stopped, metrics = optimize(MAMLPPO(**settings, target_kl=limit), steps, learner)
        free, expected = runs[taken - 1]
        assert metrics == expected
        assert distance(stopped, free) == 0
        assert stopped.optimizer["step_count"] == taken


def test_metrics_are_of_the_epochs_that_were_run_if_the_target_kl_stops_them(on_policy_steps):
    settings = {"outer_lr": 0.01, "num_epochs": 6, "tolerance": 1e-12}
    learner = build(MAMLPPO(**settings)).initialize(run_seed=0)
    steps = on_policy_steps(build(MAMLPPO(**settings)), learner)
    two, expected = optimize(MAMLPPO(**settings | {"num_epochs": 2}), steps, learner)
    (_, first), limit = optimize(MAMLPPO(outer_lr=0.01, num_epochs=1), steps, learner), expected["outer_kl"]
    stopped, metrics = optimize(MAMLPPO(**settings, target_kl=(first["outer_kl"] + limit) / 2), steps, learner)
    assert metrics == expected
    assert metrics["epochs"] == 2
    assert distance(stopped, two) == 0


def test_longer_meta_gradients_are_rescaled_in_every_step(random_steps):
    steps, settings = random_steps(2), {"optimizer": {"name": "sgd"}, "outer_lr": 0.01, "num_minibatches": 2}
    learner = build(MAMLVPG(**settings)).initialize(run_seed=0)
    free, metrics = optimize(MAMLVPG(**settings), steps, learner)
    unlimited, same = optimize(MAMLVPG(**settings, max_grad_norm=1e3), steps, learner)
    assert same.pop("largest_gradient_norm") >= metrics["meta_gradient_norm"]
    assert same == metrics
    assert distance(unlimited, free) == 0
    one = {name: value for name, value in settings.items() if name != "num_minibatches"}
    free, metrics = optimize(MAMLVPG(**one), steps, learner)
    norm = metrics["meta_gradient_norm"]
    assert length_of(learner, free) == pytest.approx(0.01 * norm, rel=1e-5)
    limited, metrics = optimize(MAMLVPG(**one, max_grad_norm=norm / 4), steps, learner)
    assert metrics["meta_gradient_norm"] == norm  # before rescaling
    assert length_of(learner, limited) == pytest.approx(0.01 * norm / 4, rel=1e-5)
    assert metrics["largest_gradient_norm"] == norm
    for name, start in learner.params.items():
        quarter = start + (free.params[name] - start) / 4
        np.testing.assert_allclose(limited.params[name], quarter, rtol=0, atol=1e-7)
    # Each of the two steps of an epoch is at most 0.01 * 0.1 long.
    twice, _ = optimize(MAMLVPG(**settings, max_grad_norm=0.1), steps, learner)
    assert 0.001 < length_of(learner, twice) <= 0.002 * (1 + 1e-4)


def length_of(before, after):
    squares = [np.square(after.params[name] - start, dtype=np.float64).sum() for name, start in before.params.items()]
    return np.sqrt(sum(squares))


def test_tolerance_looks_at_all_samples_when_there_are_minibatches(random_steps):
    steps = random_steps(2)
    settings = {"num_epochs": 5, "num_minibatches": 2}
    _, metrics = optimize(MAMLVPG(**settings, tolerance=10.0), steps)
    once, _ = optimize(MAMLVPG(**settings | {"num_epochs": 1}), steps)
    stopped, _ = optimize(MAMLVPG(**settings, tolerance=10.0), steps)
    assert metrics["epochs"] == 1
    assert distance(once, stopped) == 0


@pytest.mark.parametrize(
    "algorithm",
    [
        ProMP(trainable_inner_lr=True, tolerance=1.0, lr_schedule="LinearLR", gradient_noise=True),
        MAMLVPG(trainable_inner_lr=True, num_epochs=2, tolerance=1.0, lr_schedule="LinearLR", gradient_noise=True),
        MAMLPPO(trainable_inner_lr=True, tolerance=1.0, lr_schedule="LinearLR", gradient_noise=True),
        MAMLTRPO(gradient_noise=True),
        EMAML(gradient_noise=True),
    ],
    ids=describe,
)
def test_every_metric_of_an_update_is_in_the_glossary_of_its_page(random_steps, algorithm):
    _, metrics = optimize(algorithm, random_steps(2))
    own, shared = glossary(f"{algorithm.name.replace('-', '_')}.md")
    assert set(metrics) <= own | shared
    assert own - set(metrics) <= {"kl_order"}


def glossary(page):
    """Return the names in a page's section of metrics, and in those to which it links."""
    text = (DOCS / page).read_text().split("## Metrics\n")[1].split("\n## ")[0]
    linked = (glossary(name) for name in re.findall(r"\((\w+\.md)#metrics\)", text))
    return {*re.findall(r"`(\w+)`", text)}, set().union(*(own | shared for own, shared in linked))


@pytest.mark.parametrize("algorithm", [MAMLVPG, MAMLPPO, MAMLTRPO, EMAML], ids=lambda cls: cls.__name__)
def test_chunk_size_changes_memory_but_not_the_gradient(random_steps, algorithm):
    steps, gradients = random_steps(2, B=5), []
    for tasks_per_chunk in (1, 5):
        problem, params, _ = in_float64(algorithm(), steps)
        chunks = build_chunks(steps, tasks_per_chunk, dtype=torch.float64)
        gradients.append(meta_gradient(problem, params, chunks)[0])
    for name, value in gradients[0].items():
        np.testing.assert_allclose(gradients[1][name], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("algorithm", "settings", "message"),
    [
        (MAMLVPG, {"tolerance": 1e-3}, "no epoch to skip"),
        (MAMLVPG, {"inner_loss": "dice"}, "dice-maml or vpg-dice"),
        (MAMLVPG, {"exploration": True, "inner_steps": 0}, "no rollout batch comes before adaptation"),
        (MAMLVPG, {"e_maml_scale": "sum"}, "requires exploration, which is off"),
        (MAMLVPG, {"clip_eps": 0.1}, "unknown key"),
        (MAMLPPO, {"clip_eps": 0}, "greater than 0"),
        (MAMLPPO, {"exploration": True}, "unknown key"),
        (MAMLPPO, {"tolerance": 0}, "greater than 0"),
    ],
)
def test_impossible_and_contradictory_settings_are_refused(algorithm, settings, message):
    with pytest.raises(ValidationError, match=message):
        algorithm(**settings)

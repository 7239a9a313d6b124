"""The loop over an iteration's minibatches: every option does what it says."""

import numpy as np
import pytest
import torch

from metaloom.pipeline.algorithms.actor_critic.settings import A2C, PPO, PPO2
from metaloom.pipeline.algorithms.contract import NumericalError
from metaloom.pipeline.estimation.config import ProcessingConfig
from metaloom.pipeline.nn.distributions import DiagGaussian
from metaloom.pipeline.nn.optimizers import AdamInPlace, RMSpropInPlace
from metaloom.pipeline.types import EpisodeBatch, LearnerState, Step

from .conftest import CATEGORICAL, GAUSSIAN, POLICIES, PROCESSING, learner_of

ALL = {"a2c": A2C, "ppo": PPO, "ppo2": PPO2}


@pytest.fixture
def update(episodes_of):
    """One iteration from the start; returns the state before and after it, and the metrics."""

    def run(settings, policy=GAUSSIAN, processing=PROCESSING, state=None, seed=0):
        learner = learner_of(settings, policy, processing)
        state = state or learner.initialize(run_seed=0)
        episodes = episodes_of(policy, seed)
        step = Step(episodes, learner.process(state, episodes, seed=0), 0)
        after, metrics = learner.update(state, [step], run_seed=1, iteration=0)
        return state, after, metrics

    return run


def distance(a: LearnerState, b: LearnerState) -> float:
    return float(np.sqrt(sum(np.square(a.params[name] - b.params[name]).sum() for name in a.params)))


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("name", ALL)
def test_an_update_changes_policy_and_critic_and_is_the_same_twice(update, name, policy):
    before, after, metrics = update(ALL[name](), policy)
    _, again, _ = update(ALL[name](), policy)
    assert distance(before, after) > 0
    assert not np.array_equal(before.extra["critic.output.kernel"], after.extra["critic.output.kernel"])
    assert distance(after, again) == 0
    assert int(after.extra["num_updates"]) == 1
    assert all(np.isfinite(value) for value in metrics.values())
    assert metrics["kl"] > 0


@pytest.mark.parametrize("name", ALL)
def test_the_critic_comes_nearer_to_its_targets(update, name):
    # RMSprop's first steps are ten times its step size.
    rates = {"ppo": {"critic_learning_rate": 5e-3}, "ppo2": {"learning_rate": 5e-3}, "a2c": {"batch_size": 100}}
    _, _, metrics = update(ALL[name](**rates[name]))
    assert metrics["value_loss_after"] < metrics["value_loss_before"]


def test_one_gradient_step_of_a2c_is_rmsprop_on_the_policy_gradient(update, episodes_of):
    settings = A2C(batch_size=100, entropy_coeff=0.1)
    before, after, metrics = update(settings)
    episodes = episodes_of(GAUSSIAN)
    samples = learner_of(settings).process(before, episodes, seed=0)
    real = samples.mask != 0
    leaves = {k: torch.tensor(v, dtype=torch.float64, requires_grad=True) for k, v in before.params.items()}
    observations = torch.tensor(episodes.observations[:, :, :-1][real], dtype=torch.float64)
    mean = learner_of(settings).policy.network(leaves, observations)
    now = DiagGaussian(mean, leaves["log_std"])
    log_prob = now.log_prob(torch.tensor(episodes.actions[real], dtype=torch.float64))
    loss = -(torch.tensor(samples.advantages[real]) * log_prob).mean() - 0.1 * now.entropy()
    gradients = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    norm = np.sqrt(sum(float(g.square().sum()) for g in gradients.values()))
    assert metrics["gradient_norm"] == pytest.approx(norm, rel=1e-4)
    for name, gradient in gradients.items():
        g = gradient.numpy()
        expected = before.params[name] - 5e-4 * g / (np.sqrt(0.01 * g**2) + 1e-5)
        np.testing.assert_allclose(after.params[name], expected, rtol=1e-3, atol=1e-5)


def test_in_place_optimizers_are_torchs():
    rng = np.random.default_rng(0)
    start, gradients = rng.normal(size=9).astype(np.float32), rng.normal(size=(5, 9)).astype(np.float32)
    for ours, theirs in (
        (AdamInPlace, lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-5)),
        (RMSpropInPlace, lambda p: torch.optim.RMSprop(p, lr=0.01, eps=1e-5)),
    ):
        params, state = start.copy(), ours.initial(start)
        reference = torch.tensor(start.copy(), requires_grad=True)
        optimizer = theirs([reference])
        for gradient in gradients:
            mine = ours.of(state)
            mine.step(params, gradient, 0.01)
            state = mine.state
            reference.grad = torch.tensor(gradient)
            optimizer.step()
        np.testing.assert_allclose(params, reference.detach(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ALL)
def test_every_option_of_an_update_matters(update, name):
    _, after, _ = update(ALL[name]())
    changes = {
        "learning_rate": 1e-3,
        "batch_size": 7,
        "max_grad_norm": 1e-3,
        "entropy_coeff": 0.5,
        "initial_output_scale": 0.5,
        "critic_hidden_sizes": (5,),
        "critic_network": "residual",
        "critic_activation": "relu",
        "value_target": "empirical" if name == "ppo" else "td_lambda",
        "value_coeff": 0.1,
        "clip_eps": 0.01,
        "critic_learning_rate": 2e-3,
        "critic_num_epochs": 1,
        "critic_batch_size": 5,
        "critic_max_grad_norm": 1e-3,
        "num_epochs": 2,
        "optimizer": "SGD",
    }
    others = {"name", "kernel", "lr_schedule", "lr_decay", "lr_horizon", "advantage_scaling", "critic_network_options"}
    settable = ALL[name].model_fields.keys() - others
    for option in settable - ({"num_epochs"} if name == "a2c" else set()):
        _, changed, _ = update(ALL[name](**{option: changes[option]}))
        same = all(np.array_equal(after.params[key], changed.params[key]) for key in after.params)
        for key in after.extra.keys() & changed.extra.keys():
            same &= np.array_equal(after.extra[key], changed.extra[key])
        assert not same, option


def test_step_sizes_follow_their_schedule(update):
    exponential = PPO(lr_schedule="exponential", lr_decay=0.5)
    linear = PPO(lr_schedule="linear", lr_horizon=4)
    cosine = PPO(lr_schedule={"name": "CosineAnnealingLR", "options": {"T_max": 2}})
    cases = (exponential, [1, 0.5, 0.25]), (linear, [1, 0.75, 0.5, 0.25, 0, 0]), (cosine, [1, 0.5, 0])
    for settings, factors in cases:
        state = None
        for factor in factors:
            before, state, metrics = update(settings, state=state)
            assert metrics["learning_rate"] == pytest.approx(5e-4 * factor)
        assert (distance(before, state) == 0) == (factor == 0)


@pytest.mark.parametrize(
    "settings",
    [
        {"lr_schedule": "linear"},
        {"lr_horizon": 3},
        {"lr_decay": 0.9},
        {"lr_schedule": "linear", "lr_decay": 0.9},
        {"lr_schedule": "exponential"},
    ],
)
def test_a_schedule_without_its_settings_or_with_others_is_refused(settings):
    with pytest.raises(ValueError, match="lr_"):
        PPO(**settings)


@pytest.mark.parametrize(
    ("settings", "weight"),
    [
        (PPO(critic_learning_rate=1e-3, critic_batch_size=12, critic_num_epochs=1, optimizer="SGD"), 1),
        (A2C(learning_rate=1e-3, batch_size=12, value_coeff=0.25, value_target="td_lambda", optimizer="SGD"), 0.25),
    ],
)
def test_an_epoch_takes_every_step_once(update, episodes_of, settings, weight):
    # A step of SGD moves the critic's last bias by the mean advantage of its minibatch, one half of 24 steps.
    processing = ProcessingConfig(discount=0.9, gae_lambda=0.8, normalize_advantages=False)
    before, after, _ = update(settings, processing=processing)
    samples = learner_of(settings, processing=processing).process(before, episodes_of(GAUSSIAN), seed=0)
    moved = after.extra["critic.output.bias"] - before.extra["critic.output.bias"]
    assert moved == pytest.approx(1e-3 * weight * 2 * samples.advantages[samples.mask != 0].mean(), rel=0.01)


def test_the_initial_scale_is_that_of_the_policys_last_layer_alone():
    half, whole = (learner_of(PPO(initial_output_scale=x)).initialize(run_seed=0) for x in (0.5, 1.0))
    for name, value in whole.params.items():
        np.testing.assert_array_equal(half.params[name], value * (0.5 if name == "mean_network.output.kernel" else 1))


def test_ppos_advantages_are_those_of_the_critic_after_its_fit(update):
    # With a critic that cannot learn, PPO's policy step is that from the advantages as they were.
    _, stuck, _ = update(PPO(critic_learning_rate=1e-12))
    _, moved, _ = update(PPO(critic_learning_rate=1e-2))
    assert distance(stuck, moved) > 0


def test_running_statistics_are_kept_in_the_learner_and_grow(update, episodes_of):
    settings = A2C(advantage_scaling="running")
    _, first, _ = update(settings)
    _, second, _ = update(settings, state=first, seed=1)
    assert [float(x.extra["advantage_moments"][0]) for x in (first, second)] == [24, 48]  # real steps
    plain = learner_of(A2C()).initialize(run_seed=0)
    assert "advantage_moments" not in plain.extra
    samples = learner_of(settings).process(learner_of(settings).initialize(run_seed=0), episodes_of(GAUSSIAN), seed=0)
    real = samples.advantages[samples.mask != 0]
    assert (real.mean(), real.std()) == pytest.approx((0, 1), abs=1e-5)


def test_without_normalization_advantages_are_those_of_gae(update, episodes_of):
    processing = ProcessingConfig(discount=0.9, gae_lambda=0.8, normalize_advantages=False)
    state = learner_of(A2C()).initialize(run_seed=0)
    samples = learner_of(A2C(), processing=processing).process(state, episodes_of(GAUSSIAN), seed=0)
    scaled = learner_of(A2C()).process(state, episodes_of(GAUSSIAN), seed=0)
    for b in range(2):
        real = samples.mask[b] != 0
        raw = samples.advantages[b][real]
        np.testing.assert_allclose(scaled.advantages[b][real], (raw - raw.mean()) / raw.std(), rtol=1e-3, atol=1e-5)


def test_an_update_that_diverges_is_refused(update):
    with np.errstate(all="ignore"), pytest.raises(NumericalError, match=r"of the policy are not finite.*learning_rate"):
        update(PPO(learning_rate=1e39))


def test_what_is_not_learned_stays_under_weight_decay(update):
    optimizer = {"name": "AdamW", "options": {"weight_decay": 0.5}}
    for learn_std in (True, False):
        policy = GAUSSIAN.model_copy(update={"learn_std": learn_std})
        before, after, _ = update(PPO(optimizer=optimizer, learning_rate=0.1), policy)
        assert np.array_equal(before.params["log_std"], after.params["log_std"]) == (not learn_std)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("name", ALL)
def test_policies_and_critics_of_images_are_convolutional(name, policy):
    cnn = policy.model_copy(update={"network": "cnn", "network_options": {"channels": [2, 3]}, "activation": "relu"})
    num_actions = 3 if policy is CATEGORICAL else 0
    learner = learner_of(
        ALL[name](learning_rate=1e-2),
        cnn,
        observation_shape=(16, 16, 1),
        observation_scale=255.0,
        action_size=0 if num_actions else 2,
        num_actions=num_actions,
    )
    assert learner.kernel.name == "torch"
    assert "network is cnn" in learner.kernel.reason
    episodes = _images(num_actions)
    state = learner.initialize(run_seed=0)
    assert state.params.keys() | state.extra.keys() >= {"critic.conv_0.kernel", "critic.output.kernel"}
    for iteration in range(8):
        step = Step(episodes, learner.process(state, episodes, seed=0), 0)
        assert np.abs(step.samples.values).max() < 10  # pixels were scaled
        state, metrics = learner.update(state, [step], run_seed=1, iteration=iteration)
    assert metrics["value_loss_after"] < 0.2  # an episode's pixels tell its reward


def _images(num_actions: int) -> EpisodeBatch:
    """Episodes of one step, half of them in the dark; light is rewarded."""
    rng = np.random.default_rng(0)
    E = 64
    light = rng.integers(2, size=(1, E))
    observations = np.zeros((1, E, 2, 256), np.float32)
    observations[:, :, 0] = 255 * light[..., None]
    behavior = {"mean": np.zeros((1, E, 1, 2), np.float32), "log_std": np.zeros((1, 2), np.float32)}
    choices = {"log_probs": np.full((1, E, 1, 3), np.log(1 / 3), np.float32)}
    return EpisodeBatch(
        observations=observations,
        actions=rng.integers(3, size=(1, E, 1)) if num_actions else rng.normal(size=(1, E, 1, 2)).astype(np.float32),
        rewards=light[..., None].astype(np.float32),
        terminated=np.ones((1, E), bool),
        truncated=np.zeros((1, E), bool),
        lengths=np.ones((1, E), np.int32),
        behavior=choices if num_actions else behavior,
        reward_terms={},
        initial_state=np.zeros((1, E, 0)),
    )

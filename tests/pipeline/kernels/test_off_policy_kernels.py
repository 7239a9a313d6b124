"""The fused kernels of DQL, SAC and PEARL against their definitions in torch."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from small_setups import CHOICES, DISCRETE_ACTIONS, A, O, small_setup

from metaloom.pipeline.algorithms.off_policy.settings import DQL, SAC
from metaloom.pipeline.algorithms.pearl.settings import PEARL
from metaloom.pipeline.config.input import ConfigError
from metaloom.pipeline.kernels.pearl import GradientPart
from metaloom.pipeline.policies.config import PolicyConfig
from metaloom.pipeline.types import LearnerState, Minibatch, Transitions

K, N, C = 5, 7, 6
BOX = small_setup(PolicyConfig(hidden_sizes=(9, 8)))
DISCRETE = small_setup(BOX.policy, **DISCRETE_ACTIONS)
LINEAR = PolicyConfig(hidden_sizes=())
TANH = replace(BOX, policy=PolicyConfig(hidden_sizes=(9, 8), activation="tanh"))
SAC_SIZES = {"critic_hidden_sizes": (6, 5)}
PEARL_SIZES = {"latent_size": 2, "encoder_hidden_sizes": (8, 7), "critic_hidden_sizes": (9, 8)}
CASES = {
    "dql": (DQL(target_update_intvl=2), DISCRETE),
    "dql, unclipped adam": (DQL(max_grad_norm=None, optimizer="adam"), DISCRETE),
    "dql, linear": (DQL(), replace(DISCRETE, policy=LINEAR)),
    "sac": (SAC(**SAC_SIZES), BOX),
    "sac, linear": (SAC(critic_hidden_sizes=()), replace(BOX, policy=LINEAR)),
    "sac, clipped": (SAC(max_grad_norm=1e-2, target_update_intvl=2, **SAC_SIZES), BOX),
    "sac, rewards and fixed temperature": (
        SAC(standardize_rew=True, rew_scale=3, learn_ent_coeff=False, optimizer="rmsprop", **SAC_SIZES),
        BOX,
    ),
    "sac of tanh": (SAC(**SAC_SIZES), TANH),
    "pearl": (PEARL(**PEARL_SIZES), BOX),
    "pearl, point": (PEARL(use_information_bottleneck=False, use_next_obs_in_context=True, **PEARL_SIZES), BOX),
    "pearl, linear": (
        PEARL(latent_size=2, encoder_hidden_sizes=(), critic_hidden_sizes=()),
        replace(BOX, policy=LINEAR),
    ),
    "pearl, regularized": (
        PEARL(
            policy_mean_reg=0.3, policy_std_reg=0.2, policy_pre_activation_reg=0.1, optimizer="rmsprop", **PEARL_SIZES
        ),
        BOX,
    ),
}
cases = pytest.mark.parametrize(("settings", "setup"), CASES.values(), ids=CASES)


def transitions(rng, setup, *shape):
    def normal(*sizes):
        return rng.standard_normal((*shape, *sizes)).astype(np.float32)

    actions = rng.integers(CHOICES, size=shape) if setup.num_actions else np.tanh(normal(A))
    return Transitions(normal(O), actions, normal(), normal(O), rng.random(shape) < 0.3)


def minibatches(setup, count):
    rng = np.random.default_rng(1)
    return [Minibatch(transitions(rng, setup, K, N), transitions(rng, setup, K, C)) for _ in range(count)]


def state_of(learner, dtype):
    """Parameters that are large, so that no gradient is near zero, where rounding would decide an optimizer's step."""
    rng, initial = np.random.default_rng(0), learner.initialize(run_seed=0)

    def drawn(name, value):
        if value.dtype != np.float32:
            return value
        if not name.endswith(("kernel", "bias")):
            return value.astype(dtype)
        return (0.6 * rng.standard_normal(value.shape)).astype(dtype)

    parts = (initial.params, initial.optimizer, initial.extra)
    return LearnerState(*({name: drawn(name, value) for name, value in arrays.items()} for arrays in parts))


def gradients(steps):
    trained = (name for name, stored in steps.layout.items() if stored.optimizer and name != "alpha")
    return {name: np.asarray(steps.copies[name].gradient).copy() for name in trained}


def run(settings, setup, kernel, count, dtype):
    """Gradients of the last of some gradient steps, what described it, and the state after it."""
    learner = settings.model_copy(update={"kernel": kernel}).build(setup)
    assert learner.kernel.name == kernel
    steps, rng, described = learner.gradient_steps(state_of(learner, dtype)), np.random.default_rng(2), {}
    for minibatch in minibatches(setup, count):
        described = steps.step(minibatch, learner.noise(minibatch, rng))
    return gradients(steps), {name: float(described[name]) for name in learner.metrics}, steps.state()


@cases
def test_gradients_are_those_of_the_definition_in_double_precision(settings, setup):
    found, described, state = run(settings, setup, "fused", 3, np.float64)
    expected, expected_described, expected_state = run(settings, setup, "torch", 3, np.float64)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert np.abs(gradient).max() > 1e-5, name
        np.testing.assert_allclose(found[name], gradient, rtol=1e-10, atol=1e-10, err_msg=name)
    assert described == pytest.approx(expected_described, rel=1e-10)
    for one, other in zip(arrays(state), arrays(expected_state), strict=True):
        assert one[0] == other[0]
        np.testing.assert_allclose(one[1], other[1], rtol=1e-9, atol=1e-10, err_msg=one[0])


@cases
def test_updates_are_those_of_the_definition_in_single_precision(settings, setup):
    _, described, state = run(settings, setup, "fused", 3, np.float32)
    _, expected_described, expected_state = run(settings, setup, "torch", 3, np.float32)
    assert described == pytest.approx(expected_described, rel=1e-4, abs=1e-5)
    for (name, found), (_, expected) in zip(arrays(state), arrays(expected_state), strict=True):
        assert found.dtype == expected.dtype
        assert found.shape == expected.shape
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5, err_msg=name)


def arrays(state):
    """Every array of a state, in order, by name."""
    for part in (state.params, state.optimizer, state.extra):
        yield from part.items()


@pytest.mark.parametrize(
    ("settings", "changes", "reason"),
    [
        (SAC(), {"policy": PolicyConfig(network="residual", hidden_sizes=(8, 8))}, "network is residual"),
        (SAC(optimizer="AdamW"), {}, "optimizer is AdamW"),
        (SAC(optimizer={"name": "adam", "options": {"weight_decay": 0.1}}), {}, "optimizer is adam with"),
        (PEARL(), {"policy": PolicyConfig(activation="tanh")}, "network is an mlp of tanh"),
    ],
)
def test_what_a_kernel_does_not_know_is_computed_in_torch_or_refused(settings, changes, reason):
    setup = replace(BOX, **changes)
    settings = settings.model_copy(update={"critic_hidden_sizes": (8, 8)})
    kernel = settings.build(setup).kernel
    assert kernel.name == "torch"
    assert reason in kernel.reason
    with pytest.raises(ConfigError, match=reason):
        settings.model_copy(update={"kernel": "fused"}).build(setup)


@pytest.mark.parametrize("optimizer", ["AdamW", {"name": "adam", "options": {"weight_decay": 0.1}}, "sgd"])
@pytest.mark.parametrize(
    ("settings", "setup"), [CASES["dql"], CASES["sac"], CASES["pearl"]], ids=["dql", "sac", "pearl"]
)
def test_any_optimizer_of_torch_goes_on_where_it_was(settings, setup, optimizer):
    settings = type(settings)(**(settings.model_dump() | {"optimizer": optimizer}))
    learner = settings.build(setup)
    state, batches = learner.initialize(run_seed=0), minibatches(setup, 2)
    rng = np.random.default_rng(0)
    noise = [learner.noise(minibatch, rng) for minibatch in batches]
    at_once = learner.gradient_steps(state)
    for minibatch, drawn in zip(batches, noise, strict=True):
        at_once.step(minibatch, drawn)
        one = learner.gradient_steps(state)
        one.step(minibatch, drawn)
        state = one.state()
    for (name, found), (_, expected) in zip(arrays(state), arrays(at_once.state()), strict=True):
        if name != "num_updates":
            np.testing.assert_array_equal(found, expected, err_msg=name)


def test_where_both_values_of_pearl_are_equal_the_action_follows_the_first():
    def slope(value):
        return SimpleNamespace(input_gradient=lambda ones, columns, rows: np.full((len(rows), 2), value))

    part = SimpleNamespace(_action_columns=slice(3, 5), _dtype=np.float32, _qs={"q1": slope(1), "q2": slope(2)})
    values = {"q1": np.array([0.0, 1, 2]), "q2": np.ones(3)}
    np.testing.assert_array_equal(GradientPart._action_slopes(part, values), [[1, 1], [1, 1], [2, 2]])

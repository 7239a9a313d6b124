"""The fused gradient steps of actor-critics compute what the definition in torch says."""

from dataclasses import replace

import numpy as np
import pytest
from small_setups import CHOICES, DISCRETE_ACTIONS, A, O, small_setup

from metaloom.pipeline.algorithms.actor_critic.settings import A2C, PPO, PPO2, SVPG
from metaloom.pipeline.config.input import ConfigError
from metaloom.pipeline.estimation.experience import StepRows
from metaloom.pipeline.policies import PolicyConfig
from metaloom.pipeline.policies.inference import log_softmax
from metaloom.pipeline.types import EpisodeBatch, LearnerState, Step

N = 40
POLICY = PolicyConfig(hidden_sizes=(6, 5), init_std=0.7)

ALGORITHMS = {
    "a2c": A2C(entropy_coeff=0.02),
    "a2c, gradient clipped": A2C(max_grad_norm=0.05),
    "a2c by adam": A2C(optimizer="adam"),
    "ppo": PPO(clip_eps=0.2, critic_max_grad_norm=0.1),
    "ppo by rmsprop": PPO(clip_eps=0.2, optimizer="rmsprop", entropy_coeff=0.1),
    "ppo2": PPO2(clip_eps=0.15, max_grad_norm=0.1),
    "a2c with a linear critic": A2C(critic_hidden_sizes=()),
    "ppo2 without entropy": PPO2(clip_eps=0.15, entropy_coeff=0.0),
}
KINDS = {
    "gaussian": POLICY,
    "gaussian below its floor": POLICY.model_copy(update={"min_std": 0.7 * 0.99}),
    "gaussian at its floor": POLICY.model_copy(update={"init_std": 1.0, "min_std": 1.0}),
    "gaussian, std not learned": POLICY.model_copy(update={"learn_std": False}),
    "gaussian, relu": POLICY.model_copy(update={"activation": "relu"}),
    "gaussian, linear": POLICY.model_copy(update={"hidden_sizes": ()}),
    "categorical": PolicyConfig(hidden_sizes=(6, 5)),
}


def learner_of(settings, kind, kernel, **changes):
    changes = (DISCRETE_ACTIONS if kind == "categorical" else {}) | changes
    return settings.model_copy(update={"kernel": kernel}).build(small_setup(**{"policy": KINDS[kind]} | changes))


def behavior(kind, rng, *shape):
    if kind == "categorical":
        return {"log_probs": log_softmax(rng.normal(size=(*shape, CHOICES)))}
    return {"mean": 0.3 * rng.normal(size=(*shape, A)), "log_std": 0.1 * rng.normal(size=(*shape, A))}


def rows(kind, rng):
    actions = rng.integers(CHOICES, size=N) if kind == "categorical" else rng.normal(size=(N, A))
    scale = 1.4 if kind == "categorical" else 2.0
    # Near the log-probabilities of the policy, so that some ratios are clipped and some are not.
    old_log_prob = -scale + 0.5 * rng.normal(size=N)
    old_values = 0.3 * rng.normal(size=N)
    return StepRows(rng.normal(size=(N, O)), actions, old_log_prob, rng.normal(size=N), old_values, rng.normal(size=N))


def in_float64(state):
    def cast(arrays):
        return {k: v.astype(np.float64) if v.dtype == np.float32 else v for k, v in arrays.items()}

    return LearnerState(cast(state.params), cast(state.optimizer), cast(state.extra))


def moved(state, kind):
    """The state with one standard deviation below its floor, where there is one."""
    if kind != "gaussian below its floor":
        return state
    log_std = state.params["log_std"] + np.array([0.1, -0.1], state.params["log_std"].dtype)
    return replace(state, params=state.params | {"log_std": log_std})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_gradients_are_those_of_the_definition_in_float64(name, kind):
    settings, rng = ALGORITHMS[name], np.random.default_rng(0)
    fused, torch = (learner_of(settings, kind, kernel) for kernel in ("fused", "torch"))
    state = moved(in_float64(fused.initialize(run_seed=0)), kind)
    ours, theirs = (learner.steps(state) for learner in (fused, torch))
    data = rows(kind, rng)
    for together in (None, 0.7, None):
        norms = [float(steps.policy_gradient(data, together)) for steps in (ours, theirs)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-10)
        assert norms[0] > 0
        np.testing.assert_allclose(ours.policy_params.gradient, theirs.policy_params.gradient, rtol=1e-10, atol=1e-10)
        for steps in (ours, theirs):
            if together is None:
                steps.critic_gradient(data, 0.7, 0.3)
            steps.critic_params.step(1e-2)
            steps.policy_params.step(1e-2)
        mine, reference = ours.state(), theirs.state()
        for part in ("params", "optimizer", "extra"):
            for entry, value in getattr(reference, part).items():
                np.testing.assert_allclose(getattr(mine, part)[entry], value, rtol=1e-10, atol=1e-10, err_msg=entry)
    acted = behavior(kind, rng, N)
    described = [steps.describe(data, acted) for steps in (ours, theirs)]
    assert described[0].keys() == described[1].keys()
    assert 0 < described[1].get("clip_fraction", 0.5) < 1
    for metric, value in described[1].items():  # the definition adds 1e-8 to the denominator of the KL
        assert described[0][metric] == pytest.approx(value, rel=1e-7 if metric == "kl" else 1e-10), metric


def episodes(kind, rng, num_tasks=2, E=3, T=10):
    lengths = rng.integers(4, T + 1, size=(num_tasks, E)).astype(np.int32)
    mask = np.arange(T) < lengths[..., None]
    acted = {name: value.astype(np.float32) for name, value in behavior(kind, rng, num_tasks, E, T).items()}
    if kind == "categorical":
        actions = rng.integers(CHOICES, size=mask.shape) * mask
    else:
        noise = rng.normal(size=(*mask.shape, A))
        actions = ((acted["mean"] + noise) * mask[..., None]).astype(np.float32)
    return EpisodeBatch(
        observations=rng.normal(size=(num_tasks, E, T + 1, O)).astype(np.float32),
        actions=actions,
        rewards=(rng.normal(size=mask.shape) * mask).astype(np.float32),
        terminated=np.zeros((num_tasks, E), bool),
        truncated=np.ones((num_tasks, E), bool),
        lengths=lengths,
        behavior=acted,
        reward_terms={},
        initial_state=np.zeros((num_tasks, E, 0)),
    )


@pytest.mark.parametrize("kind", ["gaussian", "categorical"])
@pytest.mark.parametrize("name", [*ALGORITHMS, "svpg"])
def test_a_whole_update_in_float32_is_that_of_the_definition(name, kind):
    settings = ALGORITHMS.get(name, SVPG(particle=PPO2(), num_particles=2))
    experience = episodes(kind, np.random.default_rng(1))
    results = []
    for kernel in ("fused", "torch"):
        learner = learner_of(settings, kind, kernel)
        assert learner.kernel.name == kernel
        state = learner.initialize(run_seed=0)
        samples = learner.process(state, experience, seed=0)
        results.append((samples, *learner.update(state, [Step(experience, samples, 0)], run_seed=1, iteration=0)))
    (ours, mine, metrics), (theirs, reference, expected) = results
    np.testing.assert_allclose(ours.values, theirs.values, atol=1e-5)
    np.testing.assert_allclose(ours.advantages, theirs.advantages, atol=1e-5)
    for part in ("params", "extra"):
        for name, value in getattr(reference, part).items():
            np.testing.assert_allclose(getattr(mine, part)[name], value, atol=1e-5, err_msg=name)
    assert mine.optimizer.keys() == reference.optimizer.keys()
    assert metrics == pytest.approx(expected, rel=1e-3, abs=1e-5)


def test_the_kernel_is_chosen_where_it_can_compute_what_is_asked_for_and_says_why_not():
    plain = learner_of(PPO(), "gaussian", "auto")
    assert (plain.kernel.name, plain.kernel.reason) == ("fused", "plain networks on the CPU")
    for settings, changes, reason in (
        (PPO(optimizer="AdamW"), {}, "optimizer is AdamW"),
        (PPO(optimizer={"name": "adam", "options": {"amsgrad": True}}), {}, "optimizer is adam with"),
        (PPO(), {"policy": POLICY.model_copy(update={"activation": "SiLU"})}, "network is an mlp of SiLU"),
        (PPO(), {"policy": POLICY.model_copy(update={"network": "residual", "hidden_sizes": (5, 5)})}, "residual"),
    ):
        kernel = learner_of(settings, "gaussian", "auto", **changes).kernel
        assert kernel.name == "torch"
        assert reason in kernel.reason
        with pytest.raises(ConfigError, match=r"algorithm.kernel is fused, but .*" + reason):
            learner_of(settings, "gaussian", "fused", **changes)
    assert learner_of(PPO(), "gaussian", "torch").kernel.reason == "requested"

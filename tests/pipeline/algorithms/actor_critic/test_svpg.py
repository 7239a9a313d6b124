"""Stein's direction and the particles that follow it."""

import numpy as np
import pytest

from metaloom.pipeline.algorithms.actor_critic.settings import A2C, SVPG
from metaloom.pipeline.algorithms.actor_critic.stein import median_bandwidth, stein_direction
from metaloom.pipeline.estimation.experience import StepRows
from metaloom.pipeline.types import Step

from .conftest import GAUSSIAN, POLICIES, learner_of

ALONE = [[7, 3, 5]]


def updated(settings, episodes, state):
    learner = learner_of(settings)
    step = Step(episodes, learner.process(state, episodes, seed=0), 0)
    return learner.update(state, [step], run_seed=1, iteration=0)


def test_the_direction_of_two_particles_by_hand():
    # x = 0 and 2 with h² = 2: k = exp(-4 / 4). Each gets half of its own score and of the other's times k, and is
    # pushed away from the other by k · 2 / h².
    k = np.exp(-1.0)
    found = stein_direction(np.array([[0.0], [2.0]]), np.array([[1.0], [3.0]]), 2.0)
    np.testing.assert_allclose(found, [[0.5 * (1 + 3 * k - k)], [0.5 * (3 + k + k)]])


def test_the_repulsion_is_the_gradient_of_the_kernel():
    rng = np.random.default_rng(0)
    x, h2, eps = rng.normal(size=(4, 3)), 0.7, 1e-6

    def kernel(a, b):
        return np.exp(-np.square(a - b).sum() / (2 * h2))

    found = stein_direction(x, np.zeros_like(x), h2)
    for i in range(4):
        for d in range(3):
            shift = np.eye(3)[d] * eps
            slopes = [(kernel(x[j] + shift, x[i]) - kernel(x[j] - shift, x[i])) / (2 * eps) for j in range(4)]
            assert found[i, d] == pytest.approx(sum(slopes) / 4, abs=1e-8)


def test_particles_spread_like_the_density_they_are_drawn_to():
    rng = np.random.default_rng(0)
    x = rng.normal(5, 0.1, size=(30, 1))
    for _ in range(800):
        x = x + 0.2 * stein_direction(x, -(x - 1) / 4, median_bandwidth(x))  # a Gaussian around 1 with deviation 2
    assert x.mean() == pytest.approx(1, abs=0.1)
    assert x.std() == pytest.approx(2, rel=0.15)


def test_the_bandwidth_is_the_medians():
    x = np.array([[0.0], [1.0], [3.0]])  # squared distances 1, 4, 9
    assert median_bandwidth(x) == pytest.approx(0.5 * 4 / np.log(4))
    assert median_bandwidth(np.array([[0.0], [0.5]])) == pytest.approx(0.5 * 0.25 / np.log(3))
    assert median_bandwidth(np.zeros((1, 3))) == median_bandwidth(np.zeros((2, 3))) == 1


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_one_particle_with_a_flat_prior_has_a2cs_gradient_up_to_the_temperature(episodes_of, policy):
    svpg = learner_of(SVPG(particle=A2C(entropy_coeff=0.01), num_particles=1, temperature=0.25), policy)
    state = svpg.initialize(run_seed=0)
    episodes = episodes_of(policy, lengths=ALONE)
    (alone,) = svpg.split(state)
    (experience,) = svpg.experiences(episodes)
    steps = svpg.steps(alone)
    advantages = experience.rows(svpg.process(state, episodes, seed=0).advantages)
    old_log_prob = steps.old_log_prob(experience)
    steps.policy_gradient(
        StepRows(experience.observations, experience.actions, old_log_prob, advantages, advantages, advantages)
    )
    ((direction,), _) = svpg.directions([steps], 0)
    assert np.abs(direction).max() > 0
    np.testing.assert_allclose(direction, steps.policy_params.gradient / 0.25, rtol=1e-5)


def test_one_particle_at_temperature_one_updates_as_a2c_does(episodes_of):
    settings = A2C(batch_size=5)
    svpg = SVPG(particle=settings, num_particles=1)
    state = learner_of(svpg).initialize(run_seed=0)
    (alone,) = learner_of(svpg).split(state)
    alone.extra["num_updates"] = np.zeros((), np.int64)
    episodes = episodes_of(GAUSSIAN, lengths=ALONE)
    together, _ = updated(svpg, episodes, state)
    single, _ = updated(settings, episodes, alone)
    for name, value in single.params.items():
        np.testing.assert_array_equal(together.params[name][0], value)
    for name, value in single.optimizer.items():
        np.testing.assert_array_equal(together.optimizer[name][0], value)


def test_a_prior_draws_towards_zero_but_not_what_is_not_learned():
    fixed = GAUSSIAN.model_copy(update={"learn_std": False})
    svpg = learner_of(SVPG(num_particles=1, prior_std=0.5), fixed)
    (alone,) = svpg.split(svpg.initialize(run_seed=0))
    steps = svpg.steps(alone)
    ((direction,), _) = svpg.directions([steps], 0)  # no gradient yet, so the prior is all there is
    np.testing.assert_allclose(direction, steps.policy_params.vector * steps.learned / 0.25, rtol=1e-6)
    assert steps.learned.sum() == len(steps.learned) - 2


def test_the_temperature_is_annealed(episodes_of):
    svpg = SVPG(num_particles=2, temperature=8.0, temperature_decay=0.5)
    state = learner_of(svpg).initialize(run_seed=0)
    for expected in (8, 4, 2):
        state, metrics = updated(svpg, episodes_of(GAUSSIAN), state)
        assert metrics["temperature"] == expected


def test_at_the_end_of_a_horizon_particles_start_afresh_and_differently(episodes_of):
    svpg = SVPG(num_particles=2, horizon=2)
    learner = learner_of(svpg)
    start = learner.initialize(run_seed=0)
    first, _ = updated(svpg, episodes_of(GAUSSIAN), start)
    second, _ = updated(svpg, episodes_of(GAUSSIAN), first)
    name = "mean_network.hidden_0.kernel"
    assert np.abs(second.params[name] - start.params[name]).max() < 0.1  # what is kept has learned
    for state in (start, first):
        assert learner.at_start(state, run_seed=0) is state
    afresh = learner.at_start(second, run_seed=0)
    assert np.abs(afresh.params[name] - second.params[name]).max() > 0.5
    assert not np.array_equal(afresh.params[name], start.params[name])
    for state in (start, afresh):
        assert not np.array_equal(*state.params[name])
    assert not np.array_equal(afresh.extra["critic.hidden_0.kernel"], second.extra["critic.hidden_0.kernel"])
    assert not afresh.optimizer["policy.second_moment"].any()
    assert second.optimizer["policy.second_moment"].any()
    assert int(afresh.extra["num_updates"]) == 2
    often = learner_of(SVPG(num_particles=2, horizon=1)).at_start(first, run_seed=0)
    assert not np.array_equal(often.params[name], start.params[name])


def test_particles_act_each_with_its_own_parameters_counted_round():
    svpg = learner_of(SVPG(num_particles=2))
    state = svpg.initialize(run_seed=0)
    params = svpg.acting_params(state, 3).params
    for name, value in state.params.items():
        np.testing.assert_array_equal(params[name], value[[0, 1, 0]])


@pytest.mark.parametrize("particle", ["a2c", "ppo", "ppo2"])
def test_particles_learn_from_their_own_episodes_by_any_algorithm(episodes_of, particle):
    svpg = SVPG.model_validate({"particle": particle, "num_particles": 2})
    state = learner_of(svpg).initialize(run_seed=0)
    after, metrics = updated(svpg, episodes_of(GAUSSIAN), state)
    critic = "critic.hidden_0.kernel"
    assert all(not np.array_equal(after.extra[critic][j], state.extra[critic][j]) for j in range(2))
    assert metrics["kernel_bandwidth"] > 0


def test_running_statistics_of_particles_are_refused():
    with pytest.raises(ValueError, match="particles do not share time steps"):
        SVPG(particle=A2C(advantage_scaling="running"))


def test_particles_have_one_kernel_together():
    with pytest.raises(ValueError, match=r"particle.kernel is torch; set algorithm.kernel"):
        SVPG(particle=A2C(kernel="torch"))
    assert learner_of(SVPG(kernel="torch")).kernel.name == "torch"

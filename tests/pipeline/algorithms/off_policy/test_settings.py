"""Settings of algorithms with a memory: what they mean and which are refused."""

import pytest

from metaloom.pipeline.algorithms.off_policy.settings import DQL, SAC, CollectionRound, Filling
from metaloom.pipeline.config.run import RunConfig


@pytest.mark.parametrize(
    ("given", "steps"),
    [
        ({}, 1000),
        ({"num_init_memory_steps": 400}, 400),
        ({"num_init_memory_steps": 5000}, 1000),
        ({"num_init_memory_steps": 10}, 64),
    ],
)
def test_the_memory_is_filled_by_at_least_a_batch_and_at_most_its_size(given, steps):
    assert SAC(memory_size=1000, batch_size=64, **given).init_memory_steps == steps


def plan(settings):
    return settings.plan(episodes_per_task=3, max_episode_steps=50)


def test_gradient_steps_are_as_many_as_environment_steps_unless_set():
    assert plan(SAC()).gradient_steps(130) == 130
    assert plan(SAC(num_updates_per_step=7)).gradient_steps(130) == 7


@pytest.mark.parametrize(("cls", "own"), [(SAC, "tanh_gaussian"), (DQL, "q_values")])
def test_chance_fills_the_buffer_unless_a_trained_policy_is_to(cls, own):
    settings = cls(num_init_memory_steps=400)
    assert plan(settings).filling == Filling("uniform", steps=400)
    warm = settings.model_copy(update={"use_trained_policy_for_refill": True})
    assert plan(warm).filling == Filling(own, steps=400)
    assert plan(settings).rounds == (CollectionRound(3, from_posterior=False, in_context=False),)
    assert not plan(settings).scores_sparse_rewards
    assert plan(settings).context_size == 0


def test_no_more_is_kept_than_a_run_can_draw_from():
    sizes = {"num_tasks": 1, "all_tasks": 1, "max_episode_steps": 50}
    small = plan(SAC(memory_size=2000, num_init_memory_steps=400))
    assert small.most_transitions(iterations=1, **sizes) == 2 * 400 + 50 + 3 * 50
    assert small.most_transitions(iterations=9, **sizes) == 2000


@pytest.mark.parametrize(
    ("cls", "settings", "message"),
    [
        (SAC, {"memory_size": 100}, "memory_size is 100 but batch_size is 256"),
        (SAC, {"tau": 1.0}, "less than 1"),
        (SAC, {"ent_coeff_init": 0.0}, "greater than 0"),
        (SAC, {"lr_schedule": "exponential"}, "lr_decay is 1.0, which changes nothing"),
        (DQL, {"eps_init": 0.01}, "eps_final is 0.05 but eps_init is 0.01"),
        (DQL, {"eps_schedule_gamma": 1.0}, "less than 1"),
        (DQL, {"critic_hidden_sizes": [3]}, "critic_hidden_sizes"),
    ],
)
def test_settings_that_contradict_each_other_or_do_nothing_are_refused(cls, settings, message):
    with pytest.raises(ValueError, match=message):
        cls(**settings)


@pytest.mark.parametrize(("name", "scale", "actor"), [("sac", 1.0, "tanh_gaussian"), ("dql", None, "q_values")])
def test_a_run_needs_the_name_alone(name, scale, actor):
    config = RunConfig.model_validate({"env": "Hopper-v5", "algorithm": name})
    assert (config.num_tasks, config.episodes_per_task, config.env.action_scale) == (1, 1, scale)
    assert isinstance(config.algorithm, DQL | SAC)
    assert config.algorithm.actor == actor
    assert config.algorithm.graph == "off_policy"
    assert config.algorithm.adaptation_steps == 0
    assert config.policy.hidden_sizes == ((256, 256) if name == "sac" else (64, 64))


def test_epsilon_falls_by_its_factor_per_iteration():
    settings = DQL(eps_init=0.45, eps_final=0.05, eps_schedule_gamma=0.5)
    assert [settings.epsilon(k) for k in range(3)] == pytest.approx([0.45, 0.25, 0.15])

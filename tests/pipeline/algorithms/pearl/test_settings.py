"""Defaults, and what an iteration collects."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from metaloom.pipeline.algorithms.off_policy.settings import CollectionRound, Filling
from metaloom.pipeline.algorithms.pearl.settings import PEARL
from metaloom.pipeline.config.run import build_config


def test_an_iteration_by_default_is_two_prior_episodes_and_three_extra_ones():
    # Of 200 steps: 400 by the prior; 600 extra, of which the first episode starts from the prior again.
    assert PEARL().rounds(200) == (
        CollectionRound(2, from_posterior=False, in_context=True),
        CollectionRound(1, from_posterior=False, in_context=False),
        CollectionRound(1, from_posterior=True, in_context=False),
        CollectionRound(1, from_posterior=True, in_context=False),
    )
    assert PEARL().plan(episodes_per_task=1, max_episode_steps=200).filling == Filling("tanh_gaussian", episodes=10)


def test_the_buffers_of_all_tasks_have_room_for_what_a_run_collects():
    plan, sizes = PEARL().plan(episodes_per_task=1, max_episode_steps=200), {"num_tasks": 5, "max_episode_steps": 200}
    # Ten episodes in each of eight tasks and one more at first, then five in each of five tasks.
    assert plan.most_transitions(iterations=3, all_tasks=8, **sizes) == (8 * 10 + 1) * 200 + 3 * 5 * 5 * 200
    small = PEARL(memory_size=1000).plan(episodes_per_task=1, max_episode_steps=200)
    assert small.most_transitions(iterations=3, all_tasks=8, **sizes) == 8000


@pytest.mark.parametrize("name", ["num_steps_posterior", "num_extra_rl_steps_posterior"])
def test_an_iteration_has_at_most_a_thousand_rounds_of_a_phase(name):
    def of(steps):
        algorithm = {"name": "pearl", name: steps, "update_post_train": 2}
        return build_config({"env": "pearl-point-robot", "max_episode_steps": 5, "algorithm": algorithm})

    assert getattr(of(10_000).algorithm, name) == 10_000
    with pytest.raises(ValueError, match="makes 1001 rollout batches per iteration; at most 1000 are allowed"):
        of(10_006)


def test_episodes_of_the_posterior_phase_are_context_and_come_in_blocks():
    settings = PEARL(num_steps_prior=100, num_steps_posterior=90, num_extra_rl_steps_posterior=0, update_post_train=2)
    assert settings.rounds(20) == (
        CollectionRound(5, from_posterior=False, in_context=True),
        CollectionRound(2, from_posterior=False, in_context=True),
        CollectionRound(2, from_posterior=True, in_context=True),
        CollectionRound(1, from_posterior=True, in_context=True),
    )


@given(st.integers(0, 900), st.integers(0, 900), st.integers(0, 900), st.integers(1, 5), st.integers(1, 300))
def test_rounds_have_the_steps_asked_for_and_infer_only_from_a_context(prior, posterior, extra, update_every, T):
    if not prior and not posterior:
        prior = 1
    rounds = PEARL(
        num_steps_prior=prior,
        num_steps_posterior=posterior,
        num_extra_rl_steps_posterior=extra,
        update_post_train=update_every,
    ).rounds(T)
    in_context = sum(r.episodes for r in rounds if r.in_context)
    others = sum(r.episodes for r in rounds if not r.in_context)
    assert prior + posterior <= in_context * T < prior + posterior + 2 * T
    assert extra <= others * T < extra + T
    assert not rounds[0].from_posterior
    assert rounds[0].in_context
    assert all(r.episodes >= 1 for r in rounds)
    assert all(r.episodes <= update_every for r in rounds if r.from_posterior)


def test_nothing_to_infer_from_is_refused():
    with pytest.raises(ValidationError, match="nothing to infer tasks from; set one of them to at least 1"):
        PEARL(num_steps_prior=0)


def test_a_run_of_pearl_has_its_own_defaults():
    config = build_config({"env": "pearl-point-robot", "algorithm": "pearl"})
    assert config.policy.hidden_sizes == (300, 300, 300)
    assert (config.num_tasks, config.max_episode_steps, config.processing.discount) == (5, 200, 0.99)
    assert config.env.action_scale == 1
    assert config.baseline.name == "zero"

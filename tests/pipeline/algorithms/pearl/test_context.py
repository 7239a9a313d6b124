"""The context of a task: the real steps of its own episodes, and nothing else."""

from dataclasses import replace

import numpy as np
import pytest

from metaloom.pipeline.replay.buffer import ContextRounds
from metaloom.pipeline.types import EpisodeBatch, TaskParams

from .conftest import SETUP, small

POSITION = (0, 1, 2)


def counting(rewards, lengths) -> EpisodeBatch:
    """Episodes whose observations are 100 times their rewards."""
    rewards = np.array(rewards, np.float32)
    B, E, T = rewards.shape
    observations = 100 * np.concatenate([rewards, rewards[:, :, -1:]], axis=2)[..., None]
    return EpisodeBatch(
        observations=observations,
        actions=np.zeros((B, E, T, 1), np.float32),
        rewards=rewards,
        terminated=np.zeros((B, E), bool),
        truncated=np.array(lengths) > 0,
        lengths=np.array(lengths, np.int32),
        behavior={},
        reward_terms={"reward": rewards},
        initial_state=np.zeros((B, E, 0)),
    )


@pytest.fixture
def rounds() -> list[EpisodeBatch]:
    """Two rounds of two tasks; a task's rewards count its steps up."""
    return [
        counting([[[1, 2, 0], [3, 0, 0]], [[-1, -2, -3], [-4, -5, 0]]], [[2, 1], [3, 2]]),
        counting([[[4, 5, 6]], [[-6, 0, 0]]], [[3], [1]]),
    ]


@pytest.fixture
def learner():
    setup = replace(SETUP, observation_shape=(1,), action_size=1)
    return small(embedding_batch_size=4).build(setup)


def rewards_of(contexts) -> list[list[float]]:
    return [context.rewards[0].tolist() for context in contexts]


def test_all_transitions_are_every_real_step_of_the_tasks_own_episodes(rounds):
    contexts = list(ContextRounds(rounds).transitions(4))
    assert rewards_of(contexts) == [[1, 2, 3, 4, 5, 6], [-1, -2, -3, -4, -5, -6]]
    for context in contexts:
        np.testing.assert_array_equal(context.observations[..., 0], 100 * context.rewards)


def test_what_is_drawn_is_of_the_task_and_none_twice_where_there_is_enough(rounds):
    for count in (4, 6):
        for drawn, sign in zip(rewards_of(ContextRounds(rounds, POSITION).transitions(count)), (1, -1), strict=True):
            assert len(set(drawn)) == count
            assert {sign * value for value in drawn} <= {1, 2, 3, 4, 5, 6}


def test_where_there_is_too_little_it_is_drawn_with_replacement(rounds):
    first, second = rewards_of(ContextRounds(rounds[1:], POSITION).transitions(8))
    assert len(first) == len(second) == 8
    assert set(first) <= {4, 5, 6}
    assert set(second) == {-6}


def test_draws_depend_on_the_position_and_the_task():
    same = counting(np.tile(np.arange(50), (2, 1, 1)), [[50], [50]])
    drawn = [
        tuple(values)
        for position in ((0, 1, 2), (0, 1, 2), (1, 1, 2), (0, 2, 2), (0, 1, 3))
        for values in rewards_of(ContextRounds([same], position).transitions(10))
    ]
    assert drawn[:2] == drawn[2:4]
    assert len(set(drawn)) == 8


def test_a_posterior_does_not_depend_on_other_tasks(learner, rounds):
    """Bit for bit: beside none, and beside other episodes of the other task."""
    state, nothing = learner.initialize(run_seed=0), TaskParams({})

    def posterior(seen):
        return learner.adapt(state, nothing, ContextRounds(seen)).params

    both = posterior(rounds)
    alone = posterior([counting([[[1, 2, 0], [3, 0, 0]]], [[2, 1]]), counting([[[4, 5, 6]]], [[3]])])
    for episodes in rounds:
        episodes.rewards[1] = 1e3
    beside_another = posterior(rounds)
    for name in ("belief.mean", "belief.variance"):
        np.testing.assert_array_equal(both[name][:1], alone[name])
        np.testing.assert_array_equal(both[name][0], beside_another[name][0])
        assert (both[name][1] != beside_another[name][1]).all()


def test_adapting_puts_the_posterior_in_the_place_of_the_prior_and_keeps_the_policy(learner, rounds):
    state = learner.initialize(run_seed=0)
    prior = learner.acting_params(state, 2)
    for adapted in (
        learner.adapt(state, prior, ContextRounds(rounds, POSITION)),
        learner.adapt(state, prior, ContextRounds(rounds)),
    ):
        assert list(adapted.params) == list(prior.params)
        for name, value in prior.params.items():
            assert (adapted.params[name] is value) == name.startswith("policy_network.")
    assert list(learner.adapt(state, TaskParams({}), ContextRounds(rounds, POSITION)).params) == [
        "belief.mean",
        "belief.variance",
    ]


@pytest.mark.parametrize(("first_inference", "inferred"), [(1, (True, True)), (3, (False, True)), (4, (False, False))])
def test_nothing_is_inferred_until_there_are_enough_episodes_of_a_task(rounds, first_inference, inferred):
    learner = small(num_exp_traj_eval=first_inference).build(replace(SETUP, observation_shape=(1,), action_size=1))
    state = learner.initialize(run_seed=0)
    prior = learner.acting_params(state, 2)
    for n in (1, 2):
        assert (learner.adapt(state, prior, ContextRounds(rounds[:n])) is not prior) == inferred[n - 1]


@pytest.mark.parametrize("kernel", ["fused", "torch"])
def test_sparse_rewards_are_shown_of_real_steps_alone(rounds, kernel):
    # An end of zero rewards would show as so many ones.
    setup = replace(
        SETUP, observation_shape=(1,), action_size=1, sparse_rewards=lambda rewards: (rewards <= 0).astype(np.float32)
    )
    sparse, dense = (small(sparse_rewards=on, kernel=kernel).build(setup) for on in (True, False))
    state = sparse.initialize(run_seed=0)
    found = sparse.adapt(state, TaskParams({}), ContextRounds(rounds)).params
    shown = [replace(c, rewards=(c.rewards <= 0).astype(np.float32)) for c in ContextRounds(rounds).transitions(4)]
    expected = dense.infer(state, shown).params
    for name in ("belief.mean", "belief.variance"):
        np.testing.assert_array_equal(found[name], expected[name])


def test_kernel_and_definition_infer_the_same(learner, rounds):
    in_torch = learner.settings.model_copy(update={"kernel": "torch"}).build(
        replace(SETUP, observation_shape=(1,), action_size=1)
    )
    state = learner.initialize(run_seed=0)
    found, expected = (of.infer(state, ContextRounds(rounds).transitions(4)).params for of in (learner, in_torch))
    for name in ("belief.mean", "belief.variance"):
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-5, atol=1e-6)
        assert found[name].dtype == expected[name].dtype == np.float32

"""Trials as sequences: their order, what a policy with a memory sees, and advantages along them."""

import numpy as np
import pytest

from metaloom.pipeline.estimation.experience import Experience
from metaloom.pipeline.estimation.trials import Trials
from metaloom.pipeline.types import EpisodeBatch

T, A = 3, 2


def episodes(lengths, *, seed=0, num_actions=0):
    """Random episodes [B, E] of these lengths, zero on padding."""
    lengths = np.array(lengths, np.int32)
    (B, E), rng = lengths.shape, np.random.default_rng(seed)
    mask = np.arange(T) < lengths[..., None]
    actions = rng.integers(num_actions, size=(B, E, T)) if num_actions else rng.normal(size=(B, E, T, A))
    real = mask if num_actions else mask[..., None]
    return EpisodeBatch(
        observations=rng.normal(size=(B, E, T + 1, 1)).astype(np.float32),
        actions=actions * real if num_actions else (actions * real).astype(np.float32),
        rewards=(rng.normal(size=(B, E, T)) * mask).astype(np.float32),
        terminated=lengths < T,
        truncated=lengths == T,
        lengths=lengths,
        behavior={
            "mean": rng.normal(size=(B, E, T, A)).astype(np.float32),
            "log_std": rng.normal(size=(B, A)).astype(np.float32),
        },
        reward_terms={},
        initial_state=np.zeros((B, E, 0)),
    )


def test_advantages_run_through_the_ends_of_episodes_and_stop_at_the_trials_end():
    batch = episodes([[2, 1]])
    batch.rewards[0] = [[1, 2, 0], [4, 0, 0]]
    trials = Trials(batch, 2, 0)
    values = np.array([[0.5, 1.0, 1.5]])
    # δ = (1 + ½·1 - ½, 2 + ½·1½ - 1, 4 - 1½), and A_t = δ_t + ½·½ A_t+1.
    np.testing.assert_allclose(trials.advantages(values, 0.5, 0.5), [[1.59375, 2.375, 2.5]])
    # As two trials of one episode each, nothing follows the second step.
    apart = Trials(batch, 1, 0).advantages(np.array([[0.5, 1.0], [1.5, 0.0]]), 0.5, 0.5)
    np.testing.assert_allclose(apart, [[1.25, 1.0], [2.5, 0.0]])


def test_a_position_is_the_episode_the_step_in_it_and_the_discounted_share_that_is_left():
    trials = Trials(episodes([[2, 3]]), 2, 0)
    # Of at most six steps; the second episode begins although the first one ended before its limit.
    left = np.array([6, 5, 3, 2, 1])
    place, step = [[1, 0]] * 2 + [[0, 1]] * 3, np.array([0, 1, 0, 1, 2]) / 3
    for discount, share in ((1.0, left / 6), (0.5, (1 - 0.5**left) / (1 - 0.5**6)), (0.0, np.ones(5))):
        expected = np.column_stack([place, step, share])
        np.testing.assert_allclose(trials.position(T, discount)[0], expected, rtol=1e-6)


def test_a_trials_episodes_are_every_mth_of_its_task():
    batch = episodes([[3, 2, 1, 3], [1, 1, 3, 2]])
    trials = Trials(batch, 2, 0)
    assert len(trials) == 4
    expected = [[(0, 0), (0, 2)], [(0, 1), (0, 3)], [(1, 0), (1, 2)], [(1, 1), (1, 3)]]
    for n, places in enumerate(expected):
        rewards = np.concatenate([batch.rewards[b, e, : batch.lengths[b, e]] for b, e in places])
        assert trials.mask[n].sum() == len(rewards)
        assert np.array_equal(trials.rewards[n, : len(rewards)], rewards)
        assert not trials.rewards[n, len(rewards) :].any()
        means = np.concatenate([batch.behavior["mean"][b, e, : batch.lengths[b, e]] for b, e in places])
        assert np.array_equal(trials.behavior["mean"][n, : len(rewards)], means)
        assert np.array_equal(trials.behavior["log_std"][n, 0], batch.behavior["log_std"][places[0][0]])
    assert np.array_equal(trials.by_episode(trials.rewards), batch.rewards)


@pytest.mark.parametrize("num_actions", [0, 3])
def test_inputs_are_observations_and_what_the_step_before_did_and_earned(num_actions):
    batch = episodes([[2, 3, 3, 1]], num_actions=num_actions)
    trials = Trials(batch, 2, num_actions)
    size = num_actions or A
    for n, places in enumerate([[0, 2], [1, 3]]):
        seen = [(e, t) for e in places for t in range(batch.lengths[0, e])]
        before = np.zeros(size + 2)  # the first input of a trial
        for row, (e, t) in zip(trials.inputs[n], seen, strict=False):
            np.testing.assert_array_equal(row[:1], batch.observations[0, e, t])
            np.testing.assert_array_equal(row[1:], before.astype(np.float32))
            action = np.eye(3)[batch.actions[0, e, t]] if num_actions else batch.actions[0, e, t]
            before = np.concatenate([action, [batch.rewards[0, e, t], t + 1 == batch.lengths[0, e]]])


def test_nothing_of_a_trial_is_in_the_inputs_of_another():
    batch, changed = episodes([[3, 3, 3, 3]]), episodes([[3, 3, 3, 3]])
    for e in (0, 2):  # the first trial
        changed.actions[0, e], changed.rewards[0, e], changed.observations[0, e] = 7, 8, 9
    first, second = Trials(batch, 2, 0).inputs, Trials(changed, 2, 0).inputs
    assert not np.array_equal(first[0], second[0])
    assert np.array_equal(first[1], second[1])


@pytest.mark.parametrize("num_actions", [0, 4], ids=["continuous", "discrete"])
def test_what_a_step_led_to_is_of_its_own_episode(num_actions):
    batch = episodes([[2, 3]], num_actions=num_actions)
    trials = Trials(batch, 2, num_actions)
    # The first episode ends in its observation 2, not in the first one of the second.
    expected = np.concatenate([batch.observations[0, 0, 1:3], batch.observations[0, 1, 1:4]])
    assert np.array_equal(trials.next_observations[0], expected)
    # What a step saw of the one before it is what that one took.
    assert np.array_equal(trials.inputs[0, 1:, 1:-2], trials.taken[0, :-1])
    assert trials.taken.dtype == np.float32


def test_what_is_recorded_by_task_is_repeated_whatever_its_shape():
    batch = episodes([[2, 3], [1, 3]])
    batch.behavior["by_task"] = np.arange(12, dtype=np.float32).reshape(2, 2, T)  # as many as episodes and steps
    found = Trials(batch, 2, 0).behavior
    assert (found["by_task"] == batch.behavior["by_task"][:, None]).all()
    assert found["by_task"].shape == (2, 5, 2, T)
    assert (found["log_std"] == batch.behavior["log_std"][:, None]).all()


def test_behind_a_trial_its_last_episode_is_seen_to_go_on():
    batch = episodes([[2, 3, 3, 1]])
    trials = Trials(batch, 2, 0)
    inputs = trials.inputs_to_end
    assert inputs.shape == (2, 6, 1 + A + 2)
    for n, (e, length) in enumerate([(2, 5), (3, 4)]):
        np.testing.assert_array_equal(inputs[n, :length], trials.inputs[n, :length])
        t = batch.lengths[0, e] - 1
        expected = [batch.observations[0, e, t + 1], batch.actions[0, e, t], batch.rewards[0, e, t : t + 1], [0]]
        np.testing.assert_array_equal(inputs[n, length], np.concatenate(expected))
        assert not inputs[n, length + 1 :].any()
    # Episodes of three steps are cut by their limit, shorter ones have come to their end.
    assert trials.cut.tolist() == [True, False]


def test_trials_of_one_episode_are_estimated_as_actor_critics_estimate_episodes():
    batch = episodes([[2, 3], [1, 3]])
    weight = np.float32(0.7)
    expected = Experience(batch, slice(None)).estimate(lambda rows: weight * rows[:, 0], 0.9, 0.8, "td_lambda")
    trials = Trials(batch, 1, 0)
    values = weight * trials.inputs_to_end[..., 0]
    behind = np.where(trials.cut, values[np.arange(4), trials.lengths], 0)
    found = trials.by_episode(trials.advantages(values[:, :-1], 0.9, 0.8, behind))
    np.testing.assert_allclose(found, expected.advantages, rtol=1e-6)

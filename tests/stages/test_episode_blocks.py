"""Sampling until there are enough steps and episodes."""

import sys
from types import ModuleType, SimpleNamespace

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from metaloom.pipeline.envs.config import EnvConfig
from metaloom.pipeline.envs.registry import make_env
from metaloom.pipeline.nn.networks import build_network
from metaloom.pipeline.nn.spec import NetworkSpec
from metaloom.pipeline.policies.config import PolicyConfig
from metaloom.pipeline.types import BatchError, EpisodeBatch, TaskBatch, TaskParams
from metaloom.stages.collect_rollouts import RolloutPosition, Sampler, play_episodes
from metaloom.stages.rollouts.sampler import Enough, tasks_together

POLICY = PolicyConfig(hidden_sizes=(4,))
E, T = 12, 10


class Falling(gymnasium.Env):
    """Ends after 1 to 9 steps, as drawn at the reset; three choices, which count from 5."""

    observation_space = Box(-np.inf, np.inf, (2,), np.float32)
    action_space = Discrete(3, start=5)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = int(self.np_random.integers(1, 10))
        return np.array([self.left, 0], np.float32), {}

    def step(self, action):
        assert self.action_space.contains(action)
        self.left -= 1
        return np.array([self.left, action], np.float32), float(action), self.left == 0, False, {}


@pytest.fixture(autouse=True)
def own_module(monkeypatch):
    module = ModuleType("falling")
    module.__dict__["Falling"] = Falling
    monkeypatch.setitem(sys.modules, "falling", module)


@pytest.fixture
def collect():
    """Episodes of two tasks under a random policy, or of some of them."""
    params = build_network("logits_network", NetworkSpec("mlp", (2,), 3, (4,))).initialize(np.random.default_rng(0))

    def run(enough=None, first=0, stop=2, episodes=E):
        sampler = Sampler(
            EnvConfig(name="falling:Falling", action_scale=None),
            POLICY,
            episodes_per_task=episodes,
            max_episode_steps=T,
            enough=enough,
        )
        tasks = TaskBatch(np.zeros((stop - first, 0)), np.zeros(stop - first, np.int64))
        position = RolloutPosition(1, 2, 0, first_task=first)
        return play_episodes(sampler, TaskParams.broadcast(params, stop - first), tasks, position=position)

    return run


@pytest.mark.parametrize(("min_steps", "min_rollouts"), [(20, None), (None, 5), (25, 7), (8, 9)])
def test_sampling_ends_with_the_block_in_which_both_minima_are_reached(collect, min_steps, min_rollouts):
    enough = Enough(min_steps, min_rollouts, E, T)
    episodes = collect(enough)
    for lengths in episodes.lengths:
        n = int((lengths > 0).sum())
        assert n % enough.block_size == 0 or n == E
        before = lengths[: n - enough.block_size]
        assert lengths.sum() >= (min_steps or 0)
        assert n >= (min_rollouts or 0)
        assert before.sum() < (min_steps or 0) or len(before) < (min_rollouts or 1)
        assert not lengths[n:].any()
    assert not episodes.truncated.any()
    assert np.array_equal(episodes.terminated, episodes.lengths > 0)


def test_what_cannot_be_reached_ends_with_the_last_place(collect):
    episodes = collect(Enough(1000, None, 7, T), episodes=7)
    assert episodes.real.all()
    assert episodes.lengths.shape == (2, 7)


def test_a_tasks_episodes_do_not_depend_on_the_shard_that_holds_it(collect):
    enough = Enough(20, None, E, T)
    together, second = collect(enough), collect(enough, first=1)
    for name in ("observations", "actions", "rewards", "lengths", "terminated"):
        np.testing.assert_array_equal(getattr(together, name)[1:], getattr(second, name))
    np.testing.assert_array_equal(together.behavior["log_probs"][1:], second.behavior["log_probs"])


def test_without_a_limit_a_task_has_as_many_episodes_as_it_takes_and_the_others_empty_places(collect):
    enough = Enough(60, None, None, T)
    episodes = collect(enough)
    numbers = episodes.real.sum(axis=1)
    assert enough.block_size == 6
    assert numbers[0] != numbers[1]
    assert episodes.lengths.shape == (2, numbers.max())
    for lengths, number in zip(episodes.lengths, numbers, strict=True):
        assert lengths[: number - 6].sum() < 60 <= lengths.sum()


def test_tasks_of_shards_with_different_numbers_of_episodes_are_those_of_one_shard(collect):
    enough = Enough(60, None, None, T)
    together, apart = collect(enough), tasks_together([collect(enough, stop=1), collect(enough, first=1)])
    for name in ("observations", "actions", "rewards", "lengths", "terminated", "truncated", "initial_state"):
        np.testing.assert_array_equal(getattr(together, name), getattr(apart, name))
    np.testing.assert_array_equal(together.behavior["log_probs"], apart.behavior["log_probs"])


def test_what_holds_for_a_whole_task_stays_so_where_a_block_has_as_many_episodes_as_there_are_actions():
    params = build_network("mean_network", NetworkSpec("mlp", (2,), 2, (4,))).initialize(np.random.default_rng(0))
    params["log_std"] = np.float32([0.1, 0.2])
    sampler = Sampler(
        EnvConfig(name="point-2d-goal"), POLICY, episodes_per_task=5, max_episode_steps=3, enough=Enough(None, 2, 5, 3)
    )
    tasks = TaskBatch(np.ones((1, 2)), np.zeros(1, np.int64), ("goal_x", "goal_y"), ("m", "m"))
    position = RolloutPosition(1, 0, 0)
    episodes = play_episodes(sampler, TaskParams.broadcast(params, 1), tasks, position=position)
    assert episodes.real.tolist() == [[True, True, False, False, False]]
    np.testing.assert_array_equal(episodes.behavior["log_std"], [np.float32([0.1, 0.2])])


def test_blocks_are_as_small_as_can_be_enough():
    assert Enough(20, None, E, T).block_size == 2
    assert Enough(21, None, E, T).block_size == 3
    assert Enough(None, 5, E, T).block_size == 5
    assert Enough(20, 5, E, T).block_size == 5
    assert Enough(500, None, E, T).block_size == E
    assert Enough(500, None, None, T).block_size == 50
    assert Enough(None, None, None, 1).block_size == 1


@pytest.mark.parametrize(
    ("enough", "steps", "is_enough"),
    [
        (Enough(20, None, E, T), [12, 8], True),
        (Enough(20, None, E, T), [12, 7], False),
        (Enough(12, None, E, T), [12], True),
        (Enough(None, 2, E, T), [1, 1], True),
        (Enough(None, 3, E, T), [9, 9], False),
        (Enough(20, 3, E, T), [20, 1], False),
        (Enough(None, None, E, T), [], False),
        (Enough(1000, None, 2, T), [1, 1], True),
    ],
)
def test_minima_are_reached_by_exactly_as_many_steps_or_episodes(enough, steps, is_enough):
    blocks = [SimpleNamespace(real=np.ones((1, 1), bool), num_steps=count) for count in steps]
    assert enough.reached(blocks) == is_enough


def test_choices_follow_the_probabilities_that_are_recorded(collect):
    episodes = collect(episodes=400)
    real = episodes.mask != 0
    probabilities = np.exp(episodes.behavior["log_probs"][real])
    np.testing.assert_allclose(probabilities.sum(-1), 1, rtol=1e-5)
    counts = np.eye(3)[episodes.actions[real]]
    n = len(counts)
    assert n > 3000
    np.testing.assert_allclose(counts.mean(0), probabilities.mean(0), atol=4 / np.sqrt(n))
    assert np.array_equal(episodes.observations[:, :, 1:, 1][real], episodes.actions[real] + 5)  # what reached the env


def test_choices_have_no_scale():
    env = make_env(EnvConfig(name="falling:Falling", action_scale=None))
    assert env.action_space == Discrete(3)
    with pytest.raises(ValueError, match=r"--set env\.action_scale=null"):
        make_env(EnvConfig(name="falling:Falling"))


def changed(batch: EpisodeBatch, **changes) -> EpisodeBatch:
    return EpisodeBatch(**{name: changes.get(name, getattr(batch, name)) for name in batch.__dataclass_fields__})


def test_empty_places_are_the_last_and_have_no_end(collect):
    episodes = collect(Enough(20, None, E, T))
    lengths, flags = episodes.lengths.copy(), episodes.truncated.copy()
    lengths[0, 0] = 0
    with pytest.raises(BatchError, match="every task needs at least one"):
        changed(episodes, lengths=lengths)
    lengths[0, :2] = 3, 0
    with pytest.raises(BatchError, match="empty slots must come last"):
        changed(episodes, lengths=lengths)
    flags[0, -1] = True
    with pytest.raises(BatchError, match="empty slot has terminated or truncated"):
        changed(episodes, truncated=flags)

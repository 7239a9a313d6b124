"""What holds for every registered environment."""

from typing import Any

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from pipeline.envs import ENVS, EnvConfig, EnvError, MetaEnv, make_batch_env, make_env
from pipeline.envs.half_cheetah import HalfCheetahDir
from pipeline.envs.loop_batch import LoopBatch
from pipeline.envs.point_corner import PointCorner
from pipeline.envs.wrappers import SingleTask

REWARDS = {
    "point-corner": ("dense", "dense_squared", "sparse"),
    "point-walls": ("dense", "sparse"),
    "point-momentum": ("dense", "dense_squared", "sparse"),
}
CONFIGS = [
    EnvConfig(name=name, options=options)
    for name in ENVS
    for options in [{"reward": reward} for reward in REWARDS.get(name, ())] or [{}]
]


def config_id(config: EnvConfig) -> str:
    return "-".join([config.name, *map(str, config.options.values())])


# One task, or one that also decides where walls are open.
TASK_IS_MORE_THAN_REWARD = ("point-2d", "point-walls")

every_env = pytest.mark.parametrize("config", CONFIGS, ids=config_id)


@every_env
# The checker advises boxes in [-1, 1] and of finite observations, which robots do not have.
@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_gymnasiums_checker_passes(config: EnvConfig) -> None:
    env = make_env(config)
    check_env(env, skip_render_check=True)
    assert isinstance(env.unwrapped, MetaEnv)
    check_env(env.unwrapped, skip_render_check=True)


@every_env
def test_tasks_have_a_column_per_field_and_repeat_with_the_generator(config: EnvConfig) -> None:
    env = make_env(config)
    tasks = env.sample_tasks(50, np.random.default_rng(3))
    assert tasks.shape == (50, len(env.task_fields))
    assert tasks.dtype == np.float64
    assert np.array_equal(tasks, env.sample_tasks(50, np.random.default_rng(3)))
    if env.task_fields:
        assert not np.array_equal(tasks, env.sample_tasks(50, np.random.default_rng(4)))
    if env.task_set is not None:
        drawn = {tuple(task) for task in env.sample_tasks(20 * len(env.task_set), np.random.default_rng(3)).tolist()}
        assert drawn == set(env.task_set)


@pytest.mark.parametrize("config", [c for c in CONFIGS if c.name not in TASK_IS_MORE_THAN_REWARD], ids=config_id)
def test_a_task_takes_effect_at_once_and_changes_only_the_reward(config: EnvConfig) -> None:
    env = make_env(config)
    tasks = env.sample_tasks(20, np.random.default_rng(0))
    tasks = np.unique(tasks, axis=0)[[0, -1]]
    rewards, observations = [], []
    for task in tasks:
        env.set_task(tasks[0])
        env.reset(seed=7)
        for _ in range(6):
            env.step(np.full(env.action_space.shape, 9.0))
        env.set_task(task)
        assert np.array_equal(env.task, task)
        observation, reward, *_ = env.step(np.full(env.action_space.shape, 9.0))
        observations.append(observation)
        rewards.append(reward)
    assert np.array_equal(observations[0], observations[1])
    assert rewards[0] != rewards[1]


@every_env
def test_reward_terms_sum_to_the_reward(config: EnvConfig) -> None:
    env = make_env(config)
    env.reset(seed=0)
    rng = np.random.default_rng(0)
    for _ in range(30):
        _, reward, _, _, info = env.step(rng.normal(0, 5, env.action_space.shape))
        assert reward == pytest.approx(sum(info["reward_terms"].values()), abs=1e-12)


@every_env
@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_row_of_the_batch_equals_a_single_env_bit_for_bit(config: EnvConfig, num_threads: int) -> None:
    num_rows, num_steps = 5, 60
    env = make_env(config)
    batch = make_batch_env(config, num_rows, num_threads)
    assert not isinstance(batch, LoopBatch)
    rng = np.random.default_rng(1)
    tasks = env.sample_tasks(num_rows, rng)
    seeds = rng.integers(2**63, size=num_rows).astype(np.uint64)
    actions = rng.normal(0, 8, (num_steps, num_rows, batch.action_size)).astype(np.float32)

    first = batch.reset(tasks, seeds).copy()
    rows, steps = np.arange(num_rows), []
    for t in range(num_steps):
        # Rows 1 and 3 stop early: what is left must not notice.
        rows = np.array([0, 2, 4]) if t >= 20 else rows
        steps.append((rows, batch.step(actions[t, rows], rows)))

    for row in range(num_rows):
        env.set_task(tasks[row])
        observation, _ = env.reset(seed=int(seeds[row]))
        assert np.array_equal(observation, first[row])
        for t, (rows, step) in enumerate(steps):
            if row not in rows:
                break
            i = rows.tolist().index(row)
            observation, reward, terminated, truncated, info = env.step(actions[t, row])
            assert np.array_equal(observation, step.observations[i]), t
            assert {name: term[i] for name, term in step.reward_terms.items()} == info["reward_terms"], t
            assert reward == sum(term[i] for term in step.reward_terms.values())
            assert (terminated, truncated) == (step.terminated[i], step.truncated[i])


@every_env
def test_a_used_batch_resets_to_the_same_episodes(config: EnvConfig) -> None:
    batch = make_batch_env(config, 3)
    tasks = make_env(config).sample_tasks(3, np.random.default_rng(0))
    seeds, rows = np.arange(3, dtype=np.uint64), np.arange(3)
    actions = np.random.default_rng(0).normal(0, 8, (30, 3, batch.action_size)).astype(np.float32)

    def episode() -> list[np.ndarray]:
        first = batch.reset(tasks, seeds).copy()
        return [first] + [batch.step(step, rows).observations.copy() for step in actions]

    assert np.array_equal(episode(), episode())


@pytest.mark.parametrize("task", [[1.0, 2.0, 3.0], [np.nan, 1.0], 1.0])
def test_a_task_of_the_wrong_form_is_refused(task: object) -> None:
    with pytest.raises(EnvError, match=r"PointCorner.set_task.*2 finite numbers \['goal_x', 'goal_y'\]"):
        make_env(EnvConfig(name="point-corner")).set_task(np.array(task))


def test_a_robot_with_its_own_step_is_not_batched_by_the_rules_it_replaced() -> None:
    class Slow(PointCorner):
        def step(self, action: np.ndarray) -> Any:
            return super().step(action / 2)

    class Slower(HalfCheetahDir):
        def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
            return super().reset(seed=0, options=options)

    assert Slow().batch(2, 1) is None
    assert Slower().batch(2, 1) is None
    assert PointCorner().batch(2, 1) is not None


def test_single_task_env_has_one_task_without_parameters() -> None:
    env = SingleTask(make_env(EnvConfig(name="point-corner")))
    assert env.sample_tasks(3, np.random.default_rng(0)).shape == (3, 0)
    assert env.task.shape == (0,)

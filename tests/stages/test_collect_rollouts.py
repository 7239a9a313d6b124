import sys
from dataclasses import replace
from types import ModuleType

import mujoco
import numpy as np
import pytest

from metaloom.pipeline.envs.config import EnvConfig
from metaloom.pipeline.envs.contract import MetaEnv
from metaloom.pipeline.envs.half_cheetah import HalfCheetahDir
from metaloom.pipeline.envs.point import Point2DGoal, PointRobot
from metaloom.pipeline.envs.registry import make_env
from metaloom.pipeline.policies.acting import make_actor
from metaloom.pipeline.policies.config import PolicyConfig
from metaloom.pipeline.seeding import generator, seed_for
from metaloom.pipeline.tasks.samplers import draw_tasks
from metaloom.pipeline.types import EpisodeBatch, TaskBatch, TaskParams
from metaloom.stages.collect_rollouts import RolloutPosition, Sampler, play_episodes
from metaloom.stages.rollouts.faults import RolloutError
from metaloom.stages.rollouts.sampler import RolloutWatch

POLICY = PolicyConfig(hidden_sizes=(9, 6))


class Fading(Point2DGoal):
    """Ends at chance moments that depend on the place, so that episodes have very different lengths."""

    def start(self, rng: np.random.Generator) -> np.ndarray:
        return rng.uniform(-1, 1, 2)

    def terminal(self, states: np.ndarray, tasks: np.ndarray) -> np.ndarray:
        return np.modf(np.abs(states[:, 0]) * 1e4)[0] < 0.08


class Breaking(Point2DGoal):
    """Its reward is not a number from the third step of one task on."""

    def reward_terms(self, states: np.ndarray, next_states: np.ndarray, tasks: np.ndarray) -> dict[str, np.ndarray]:
        terms = super().reward_terms(states, next_states, tasks)
        self._calls = getattr(self, "_calls", 0) + 1
        terms["distance"][tasks[:, 0] == 3.0] *= np.nan if self._calls >= 3 else 1.0
        return terms


class Looped(Fading):
    """Fading without a batch of its own."""

    def batch(self, num_rows: int, num_threads: int) -> None:
        return None


FADING, LOOPED, BREAKING = (EnvConfig(name=f"rollout_envs:{c}") for c in ("Fading", "Looped", "Breaking"))


@pytest.fixture(autouse=True)
def own_module(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("rollout_envs")
    module.__dict__.update(Fading=Fading, Looped=Looped, Breaking=Breaking)
    monkeypatch.setitem(sys.modules, "rollout_envs", module)


def task_params(env: MetaEnv, num_tasks: int, seed: int = 0) -> TaskParams:
    assert env.observation_space.shape is not None
    assert env.action_space.shape is not None
    sizes = [env.observation_space.shape[0], *POLICY.hidden_sizes, env.action_space.shape[0]]
    rng = np.random.default_rng(seed)
    params = {}
    for layer, rows, columns in zip(("hidden_0", "hidden_1", "output"), sizes[:-1], sizes[1:], strict=True):
        params[f"mean_network.{layer}.kernel"] = rng.normal(0, 0.7, (num_tasks, rows, columns)).astype(np.float32)
        params[f"mean_network.{layer}.bias"] = rng.normal(0, 0.7, (num_tasks, columns)).astype(np.float32)
    params["log_std"] = rng.normal(0, 0.3, (num_tasks, sizes[-1])).astype(np.float32)
    return TaskParams(params)


def rollouts(
    config: EnvConfig,
    shards: list[tuple[int, int]] | None = None,
    *,
    num_tasks: int = 7,
    E: int = 5,
    T: int = 30,
    threads: int = 1,
    iteration: int = 0,
    step: int = 0,
    sampler: Sampler | None = None,
) -> EpisodeBatch:
    sampler = sampler or Sampler(config, POLICY, episodes_per_task=E, max_episode_steps=T, num_threads=threads)
    env = make_env(config)
    params = task_params(env, num_tasks)
    tasks = draw_tasks(env, num_tasks=num_tasks, run_seed=1, iteration=0)
    return EpisodeBatch.concatenate(
        [
            play_episodes(
                sampler,
                params.slice(start, stop),
                tasks.slice(start, stop),
                position=RolloutPosition(1, iteration, step, first_task=start),
            )
            for start, stop in shards or [(0, num_tasks)]
        ]
    )


def arrays(episodes: EpisodeBatch) -> dict[str, np.ndarray]:
    values = {name: value for name, value in vars(episodes).items() if isinstance(value, np.ndarray)}
    return values | {f"{k}.{n}": v for k in ("behavior", "reward_terms") for n, v in getattr(episodes, k).items()}


def assert_same_bits(a: EpisodeBatch, b: EpisodeBatch) -> None:
    first, second = arrays(a), arrays(b)
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert value.dtype == second[name].dtype
        assert value.tobytes() == second[name].tobytes(), name


CHEETAH = EnvConfig(name="half-cheetah-dir")
several = pytest.mark.parametrize("config", [CHEETAH, FADING, LOOPED], ids=lambda c: c.name)


@several
@pytest.mark.parametrize("shards", [[(0, 3), (3, 7)], [(0, 1), (1, 6), (6, 7)], [(i, i + 1) for i in range(7)]])
def test_bits_do_not_depend_on_how_tasks_are_split(config: EnvConfig, shards: list[tuple[int, int]]) -> None:
    assert_same_bits(rollouts(config, shards), rollouts(config))


@several
def test_bits_do_not_depend_on_the_order_in_which_shards_are_computed(config: EnvConfig) -> None:
    shards = [(0, 2), (2, 3), (3, 6), (6, 7)]
    computed = {shards[i]: rollouts(config, [shards[i]]) for i in (2, 0, 3, 1)}
    assert_same_bits(EpisodeBatch.concatenate([computed[shard] for shard in shards]), rollouts(config))


@pytest.mark.slow
def test_bits_of_a_default_sized_half_cheetah_round_do_not_depend_on_the_split() -> None:
    whole = rollouts(CHEETAH, num_tasks=40, E=20, T=20)
    for shards in ([(0, 20), (20, 40)], [(0, 13), (13, 40)]):
        assert_same_bits(rollouts(CHEETAH, shards, num_tasks=40, E=20, T=20), whole)


def test_bits_do_not_depend_on_threads_or_on_a_warm_sampler() -> None:
    sampler = Sampler(CHEETAH, POLICY, episodes_per_task=5, max_episode_steps=30)
    rollouts(CHEETAH, iteration=4, sampler=sampler)
    warm = rollouts(CHEETAH, sampler=sampler)
    assert_same_bits(warm, rollouts(CHEETAH, threads=2))
    assert_same_bits(warm, rollouts(CHEETAH, threads=3))


def test_a_loop_over_envs_gives_the_bits_of_the_batch() -> None:
    batched = rollouts(FADING)
    assert_same_bits(replace(rollouts(LOOPED), initial_state=batched.initial_state), batched)


def test_rounds_differ_between_iterations_steps_tasks_and_episodes() -> None:
    first = rollouts(CHEETAH)
    for other in (rollouts(CHEETAH, iteration=1), rollouts(CHEETAH, step=1)):
        assert not np.array_equal(first.initial_state, other.initial_state)
        assert not np.array_equal(first.actions, other.actions)
    starts = first.initial_state.reshape(35, -1)
    assert len(np.unique(starts, axis=0)) == 35
    noise = ((first.actions - first.behavior["mean"]) / np.exp(first.behavior["log_std"])[:, None, None]).reshape(
        35, -1
    )
    assert len(np.unique(noise.round(3), axis=0)) == 35


def test_an_episode_starts_as_a_single_env_reset_with_its_seed_and_is_what_that_env_would_do() -> None:
    episodes = rollouts(CHEETAH, iteration=3, step=1)
    env = make_env(CHEETAH)
    tasks = draw_tasks(env, num_tasks=7, run_seed=1, iteration=0)
    b, e = 4, 2
    env.set_task(tasks.params[b])
    observation, _ = env.reset(seed=seed_for(1, "resets", 3, 1, b, e))
    assert np.array_equal(observation.astype(np.float32), episodes.observations[b, e, 0])
    for t in range(30):
        observation, reward, *_, info = env.step(episodes.actions[b, e, t])
        assert np.array_equal(observation.astype(np.float32), episodes.observations[b, e, t + 1])
        assert np.float32(reward) == episodes.rewards[b, e, t]
        assert {n: np.float32(v) for n, v in info["reward_terms"].items()} == {
            n: v[b, e, t] for n, v in episodes.reward_terms.items()
        }


def test_actions_are_the_means_plus_the_tasks_own_noise() -> None:
    episodes = rollouts(CHEETAH, iteration=2, step=1)
    std = np.exp(episodes.behavior["log_std"])
    for b in range(7):
        noise = generator(1, "actions", 2, 1, b).standard_normal((30, 5, 6), np.float32).swapaxes(0, 1)
        expected = episodes.behavior["mean"][b] + noise * std[b]
        np.testing.assert_allclose(episodes.actions[b], expected, atol=1e-6)


def test_every_task_has_exactly_E_complete_episodes_and_nothing_after_their_ends() -> None:
    episodes = rollouts(FADING)
    assert episodes.lengths.shape == (7, 5)
    assert len(np.unique(episodes.lengths)) > 5
    assert episodes.terminated.any()
    assert episodes.truncated.any()
    assert np.array_equal(episodes.truncated, ~episodes.terminated)
    assert np.array_equal(episodes.lengths[episodes.truncated], np.full(episodes.truncated.sum(), 30))
    for b, e in np.ndindex(7, 5):
        length = episodes.lengths[b, e]
        visited = episodes.observations[b, e, : length + 1]
        assert (visited != 0).all()
        assert not episodes.observations[b, e, length + 1 :].any()
        for padded in (episodes.actions, episodes.rewards, episodes.behavior["mean"], *episodes.reward_terms.values()):
            assert padded[b, e, :length].any()
            assert not padded[b, e, length:].any()


def test_an_episode_does_not_notice_that_others_end() -> None:
    class Endless(Fading):
        def terminal(self, states: np.ndarray, tasks: np.ndarray) -> np.ndarray:
            return PointRobot.terminal(self, states, tasks)

    sys.modules["rollout_envs"].__dict__["Endless"] = Endless
    fading, endless = rollouts(FADING), rollouts(EnvConfig(name="rollout_envs:Endless"))
    for b, e in np.ndindex(7, 5):
        length = fading.lengths[b, e]
        for name in ("observations", "actions", "rewards"):
            assert np.array_equal(getattr(fading, name)[b, e, :length], getattr(endless, name)[b, e, :length])


def test_reward_terms_sum_to_the_rewards() -> None:
    for config in (CHEETAH, FADING):
        episodes = rollouts(config)
        total = sum(term.astype(np.float64) for term in episodes.reward_terms.values())
        np.testing.assert_allclose(total, episodes.rewards, atol=1e-6, rtol=1e-6)


def test_an_envs_own_time_limit_is_a_truncation() -> None:
    class Limited(Looped):
        def step(self, action: np.ndarray):
            observation, reward, terminated, _, info = super().step(action)
            self._t = getattr(self, "_t", 0) + 1
            return observation, reward, terminated, self._t == 4, info

    sys.modules["rollout_envs"].__dict__["Limited"] = Limited
    episodes = rollouts(EnvConfig(name="rollout_envs:Limited"))
    assert episodes.lengths.max() == 4
    assert np.array_equal(episodes.truncated, ~episodes.terminated)
    assert episodes.truncated.any()


def test_an_actor_is_told_that_its_episodes_end_at_the_step_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    told = []

    def watched(*arguments):
        actor = make_actor(*arguments)
        actor.learn_of = lambda rows, rewards, ended: told.append((rows.tolist(), ended.tolist()))
        return actor

    monkeypatch.setattr("metaloom.stages.collect_rollouts.make_actor", watched)
    rollouts(EnvConfig(name="point-2d-goal"), num_tasks=1, E=2, T=3)
    assert told == [([0, 1], [False, False]), ([0, 1], [False, False]), ([0, 1], [True, True])]


def test_numbers_that_are_not_finite_stop_the_rollout_and_are_named() -> None:
    sampler = Sampler(BREAKING, POLICY, episodes_per_task=5, max_episode_steps=30)
    env = make_env(BREAKING)
    goals = np.array([[0.0, 1.0], [3.0, 1.0]])
    tasks = TaskBatch(goals, np.array([-1, -1]), ("goal_x", "goal_y"), ("m", "m"))
    with pytest.raises(
        RolloutError,
        match=r"iteration 5, collect_rollouts k=1: rollout_envs:Breaking, task 9 \(goal_x=3, goal_y=1\), episode 0 "
        r"\(reset seed \d+\), step 2: rewards are not finite",
    ):
        play_episodes(sampler, task_params(env, 2), tasks, position=RolloutPosition(1, 5, 1, first_task=8))


def test_a_policy_for_another_env_is_refused_before_a_step() -> None:
    sampler = Sampler(CHEETAH, POLICY, episodes_per_task=1, max_episode_steps=5)
    tasks = draw_tasks(make_env(CHEETAH), num_tasks=2, run_seed=1, iteration=0)
    with pytest.raises(ValueError, match=r"log_std: got \(2, 2\); expected \[B, 6\]"):
        play_episodes(sampler, task_params(make_env(FADING), 2), tasks, position=RolloutPosition(1, 0, 0))


def test_the_sampler_keeps_simulators_warm_and_only_the_last_few() -> None:
    sampler = Sampler(FADING, POLICY, episodes_per_task=2, max_episode_steps=5)
    first = sampler.batch(3)
    assert sampler.batch(3) is first
    assert first.num_rows == 6
    kept = [sampler.batch(num_tasks) for num_tasks in range(4, 8)]
    assert all(sampler.batch(num_tasks) is batch for num_tasks, batch in enumerate(kept, 4))
    assert sampler.batch(3) is not first
    sampler.close()
    assert sampler.batch(7).num_rows == 14


def test_kept_simulators_tell_the_observer_of_their_rollout_which_row_is_called() -> None:
    class Watch(RolloutWatch):
        def __init__(self) -> None:
            self.rows: list[int] = []

        def row(self, row: int) -> None:
            self.rows.append(row)

    sampler, watch = Sampler(LOOPED, POLICY, episodes_per_task=3, max_episode_steps=5), Watch()
    kept = sampler.batch(1)
    assert sampler.batch(1, watch) is kept
    kept.reset(np.ones((3, 2)), np.arange(3, dtype=np.uint64))
    assert watch.rows == [0, 1, 2]


def test_a_recorded_start_leads_to_the_recorded_episode() -> None:
    episodes = rollouts(CHEETAH)
    robot = HalfCheetahDir()
    robot.reset(seed=0)
    state = episodes.initial_state[2, 3]
    mujoco.mj_resetData(robot.model, robot.data)
    robot.data.qpos[:], robot.data.qvel[:] = state[:9], state[9:]
    mujoco.mj_forward(robot.model, robot.data)
    for t in range(30):
        observation, *_ = robot.step(np.clip(episodes.actions[2, 3, t].astype(np.float64) / 10, -1, 1))
    np.testing.assert_allclose(observation, episodes.observations[2, 3, 30], atol=1e-5)

"""Properties of every registered environment."""

import pickle
import re
from typing import Any

import numpy as np
import pytest
from env_names import ENV_NAMES
from gymnasium.envs.classic_control import CartPoleEnv
from gymnasium.spaces import Discrete
from gymnasium.utils.env_checker import check_env

from metaloom.pipeline.envs.config import EnvConfig
from metaloom.pipeline.envs.contract import EnvError, MetaEnv
from metaloom.pipeline.envs.half_cheetah import HalfCheetahDir
from metaloom.pipeline.envs.loop_batch import LoopBatch
from metaloom.pipeline.envs.mujoco_robot import MujocoRobot
from metaloom.pipeline.envs.point import PointRobot
from metaloom.pipeline.envs.point_corner import PointCorner
from metaloom.pipeline.envs.registry import make_batch_env, make_env, with_all_options
from metaloom.pipeline.envs.wrappers import SingleTask

OPTIONS = {
    "point-corner": ("reward", ("dense", "dense_squared", "sparse")),
    "point-walls": ("reward", ("dense", "sparse")),
    "point-momentum": ("reward", ("dense", "dense_squared", "sparse")),
    "pearl-sparse-point-robot": ("reward", ("dense", "sparse")),
    "walker2d-dir": ("model", ("original", "v5")),
    "ant-dir": ("obs_style", ("promp", "pearl", "v5")),
    "ant-goal": ("obs_style", ("promp", "pearl", "v5")),
    "half-cheetah-vel": ("obs_style", ("promp", "pearl", "v5")),
    "hidden-goal-grid": ("excluded", ("block", "start")),
    "humanoid-dir": ("obs_style", ("promp", "pearl", "v5")),
    "pearl-ant-dir": ("forward_backward", (False, True)),
    "swimmer-vel": ("obs_style", ("promp", "v5")),
}
"""Options that change the numbers, with all their values: each is tested."""
CONFIGS = [
    EnvConfig(name=name, options={} if value is None else {option: value})
    for name in ENV_NAMES
    for option, values in [OPTIONS.get(name, ("", (None,)))]
    for value in values
]


def config_id(config: EnvConfig) -> str:
    return "-".join([config.name, *map(str, config.options.values())])


# One task; ones that also decide where things are, where walls are open or what follows a state; a body.
TASK_IS_MORE_THAN_REWARD = ("metaworld-ml1-reach", "point-2d", "point-walls", "tabular-mdp")
TASK_IS_A_BODY = tuple(name for name in ENV_NAMES if name.endswith("-rand-params"))

# Names whose episodes all begin in one place.
STARTS_AT_THE_ORIGIN = ("point-2d-goal", "navigation-2d", "pearl-sparse-point-robot")
BEGINS_ALIKE = (*STARTS_AT_THE_ORIGIN, "bernoulli-bandit", "hidden-goal-grid", "metaworld-ml1-reach", "tabular-mdp")
NOTHING_IS_LEFT_TO_CHANCE = (*STARTS_AT_THE_ORIGIN, "hidden-goal-grid", "metaworld-ml1-reach")

REWARDS_ARE_DRAWN = ("bernoulli-bandit", "tabular-mdp")
FIELDS_OF_A_KIND = {
    **dict.fromkeys(TASK_IS_A_BODY, ("BODY_mass", "JOINT_damping")),
    "bernoulli-bandit": ("p_0",),
    "metaworld-ml1-reach": ("class", "goal_1", "goal_6"),
}

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


@every_env
def test_tasks_to_test_with_are_others_than_those_to_train_on_and_equal_in_every_process(config: EnvConfig) -> None:
    env, again = make_env(config), make_env(config)
    assert (env.task_set, env.test_task_set) == (again.task_set, again.test_task_set)
    if env.test_task_set is None:
        return
    assert env.task_set is not None
    for tasks in (env.task_set, env.test_task_set):
        assert len(set(tasks)) == len(tasks)
        assert np.array(tasks).shape == (len(tasks), len(env.task_fields))
    assert not set(env.task_set) & set(env.test_task_set)


def drawn_actions(env: MetaEnv, rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Actions [*shape, A], most of them out of range, or any of the discrete ones [*shape]."""
    if isinstance(env.action_space, Discrete):
        return rng.integers(int(env.action_space.n), size=shape)
    return rng.normal(0, 8, (*shape, *(env.action_space.shape or ())))


def an_action(env: MetaEnv, value: float) -> Any:
    """The same number in every place, or the first of the discrete actions."""
    return 0 if isinstance(env.action_space, Discrete) else np.full(env.action_space.shape or (), value)


def episode(env: MetaEnv, seed: int, num_steps: int = 20) -> bytes:
    """All numbers of an episode of fixed actions."""
    numbers = [env.reset(seed=seed)[0]]
    for action in drawn_actions(env, np.random.default_rng(0), num_steps):
        observation, reward, terminated, *_ = env.step(action)
        numbers += [observation, [reward, terminated]]
    return np.concatenate(numbers, dtype=np.float64).tobytes()


@every_env
def test_the_seed_of_a_reset_decides_the_episode(config: EnvConfig) -> None:
    env, other = make_env(config), make_env(config)
    first = episode(env, seed=5)
    assert episode(other, seed=5) == first
    assert episode(env, seed=5) == first
    if config.name not in NOTHING_IS_LEFT_TO_CHANCE:
        assert episode(env, seed=6) != first


@every_env
def test_resets_without_a_seed_go_on_from_the_last_one(config: EnvConfig) -> None:
    env = make_env(config)
    starts = [env.reset(seed=5)[0], env.reset()[0], env.reset(seed=5)[0], env.reset()[0]]
    assert np.array_equal(starts[0], starts[2])
    assert np.array_equal(starts[1], starts[3])
    if config.name not in BEGINS_ALIKE:
        assert not np.array_equal(starts[0], starts[1])


@every_env
def test_a_pickled_env_goes_on_with_its_task_and_its_episode(config: EnvConfig) -> None:
    env = make_env(config)
    env.set_task(env.sample_tasks(2, np.random.default_rng(8))[1])
    env.reset(seed=1)
    copy = pickle.loads(pickle.dumps(env))
    assert np.array_equal(copy.task, env.task)
    action = an_action(env, 3.0)
    for ours, theirs in zip(env.step(action), copy.step(action), strict=True):
        assert np.array_equal(ours, theirs) if isinstance(ours, np.ndarray) else ours == theirs
    assert episode(copy, seed=2) == episode(env, seed=2)


@every_env
def test_numbers_of_a_task_are_named_and_explained(config: EnvConfig) -> None:
    fields = make_env(config).task_fields
    assert len({field.name for field in fields}) == len(fields)
    for field in fields:
        assert re.fullmatch(r"[a-z][a-z0-9_]*", field.name), field
        assert field.unit
        assert len(field.description) > 5, field


@every_env
def test_the_docstring_is_a_data_sheet(config: EnvConfig) -> None:
    env = make_env(config).unwrapped
    own = type(env).__doc__
    sheet = "\n".join(base.__doc__ or "" for base in type(env).__mro__ if base.__module__.startswith("metaloom."))
    assert own
    assert "| observation |" in sheet
    assert re.search(r"\| action +\|", sheet)
    # One field for every number of a body or every arm would be no sheet: it names the kinds.
    fields = FIELDS_OF_A_KIND.get(config.name) or [f.name for f in env.task_fields]
    env.reset(seed=0)
    terms = env.step(an_action(env, 0.0))[4]["reward_terms"]
    for word in (*fields, *terms):
        assert re.search(rf"\b{word}\b", sheet), word


def step_under_each_task(config: EnvConfig) -> tuple[list[np.ndarray], list[float]]:
    """Observations and rewards of a step under each of several tasks, all from the same state."""
    env = make_env(config)
    tasks = np.unique(env.sample_tasks(60, np.random.default_rng(0)), axis=0)
    action = an_action(env, 9.0)
    rewards, observations = [], []
    for task in tasks:
        env.set_task(tasks[0])
        env.reset(seed=7)
        for _ in range(7):
            env.step(action)
        env.set_task(task)
        assert np.array_equal(env.task, task)
        observation, reward, *_ = env.step(action)
        observations.append(observation)
        rewards.append(reward)
    return observations, rewards


@pytest.mark.parametrize(
    "config", [c for c in CONFIGS if c.name not in TASK_IS_MORE_THAN_REWARD + TASK_IS_A_BODY], ids=config_id
)
def test_a_task_takes_effect_at_once_and_changes_only_the_reward(config: EnvConfig) -> None:
    observations, rewards = step_under_each_task(config)
    assert all(np.array_equal(observation, observations[0]) for observation in observations)
    assert len(set(rewards)) > 1


@pytest.mark.parametrize("config", [c for c in CONFIGS if c.name in TASK_IS_A_BODY], ids=config_id)
def test_a_body_takes_effect_at_once(config: EnvConfig) -> None:
    observations, rewards = step_under_each_task(config)
    assert len({observation.tobytes() for observation in observations}) == len(set(rewards)) == len(rewards)


@every_env
def test_reward_terms_sum_to_the_reward(config: EnvConfig) -> None:
    env = make_env(config)
    env.reset(seed=0)
    rng = np.random.default_rng(0)
    for _ in range(30):
        _, reward, _, _, info = env.step(drawn_actions(env, rng))
        assert reward == pytest.approx(sum(info["reward_terms"].values()), abs=1e-12)


@every_env
def test_a_row_of_the_batch_equals_a_single_env_bit_for_bit(config: EnvConfig) -> None:
    num_rows, num_steps = 5, 60
    env = make_env(config)
    batch = make_batch_env(config, num_rows, num_threads=2)
    brings = [getattr(type(env.unwrapped), name) is not getattr(MetaEnv, name) for name in ("batch", "row_batch")]
    assert isinstance(batch, LoopBatch) == (not any(brings))
    rng = np.random.default_rng(1)
    tasks = env.sample_tasks(num_rows, rng)
    seeds = rng.integers(2**63, size=num_rows).astype(np.uint64)
    actions = drawn_actions(env, rng, num_steps, num_rows)
    actions = actions if actions.dtype == np.int64 else actions.astype(np.float32)

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
    actions = drawn_actions(make_env(config), np.random.default_rng(0), 30, 3)

    def episode() -> list[np.ndarray]:
        first = batch.reset(tasks, seeds).copy()
        return [first] + [batch.step(step, rows).observations.copy() for step in actions]

    assert np.array_equal(episode(), episode())


@every_env
def test_a_batch_keeps_its_tasks_when_the_callers_array_changes(config: EnvConfig) -> None:
    batch = make_batch_env(config, 2)
    tasks = make_env(config).sample_tasks(4, np.random.default_rng(0))
    # Rewards that are drawn may be equal by chance.
    steps = [an_action(make_env(config), 1.0)] * (20 if config.name in REWARDS_ARE_DRAWN else 1)

    def rewards(given: np.ndarray, later: np.ndarray) -> np.ndarray:
        batch.reset(given, np.arange(2, dtype=np.uint64))
        given[:] = later
        results = [batch.step(np.stack([step, step]), np.arange(2)) for step in steps]
        return np.stack([sum(result.reward_terms.values(), np.zeros(2)) for result in results])

    assert np.array_equal(rewards(tasks[:2].copy(), tasks[2:]), rewards(tasks[:2].copy(), tasks[:2]))


@pytest.mark.parametrize("name", ENV_NAMES)
def test_a_film_of_every_step_shows_a_robot_at_its_speed(name: str) -> None:
    env = make_env(EnvConfig(name=name))
    if isinstance(env.unwrapped, MujocoRobot):
        assert env.metadata["render_fps"] == round(1 / env.unwrapped.dt)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("pearl-ant-dir", {"forward_backward": "maybe"}, "forward_backward is 'maybe'; expected true or false"),
        (
            "pearl-ant-dir",
            {"forward_backward": True, "num_test_tasks": 31},
            "is on, which has exactly two tasks; remove",
        ),
        (
            "pearl-ant-dir",
            {"forward_backward": True, "num_train_tasks": 9},
            "is on, which has exactly two tasks; remove",
        ),
        ("walker2d-dir", {"model": ["v5"]}, r"model is \['v5'\]; expected one of original, v5"),
        ("ant-dir", {"obs_style": ["v5"]}, r"obs_style is \['v5'\]; expected one of promp, pearl, v5"),
        ("pearl-sparse-point-robot", {"reward": ["sparse"]}, r"reward is \['sparse'\]; expected one of dense, sparse"),
    ],
)
def test_an_option_of_the_wrong_kind_is_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(EnvError, match=message):
        make_env(EnvConfig(name=name, options=options))


@every_env
def test_options_can_be_written_out_and_then_mean_the_same(config: EnvConfig) -> None:
    whole = with_all_options(config)
    assert whole.options.items() >= config.options.items()
    assert with_all_options(whole) == whole == EnvConfig.model_validate_json(whole.model_dump_json())
    assert episode(make_env(whole), seed=5) == episode(make_env(config), seed=5)
    styled = getattr(make_env(config).unwrapped, "obs_style", None)
    assert whole.options.get("obs_style") == styled


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


def test_tasks_of_a_finite_set_are_drawn_evenly_and_an_environment_without_any_says_what_it_needs() -> None:
    class Corners(PointCorner):
        task_set = ((-2.0, -2.0), (2.0, 2.0), (2.0, -2.0))
        sample_tasks = MetaEnv.sample_tasks

    drawn = Corners().sample_tasks(3000, np.random.default_rng(0))
    found, counts = np.unique(drawn, axis=0, return_counts=True)
    assert found.tolist() == [[-2, -2], [2, -2], [2, 2]]
    assert counts.min() > 900  # a binomial of mean 1,000 and standard deviation 26
    with pytest.raises(EnvError, match=r"Endless has no task_set and no method sample_tasks"):
        type("Endless", (Corners,), {"task_set": None})().sample_tasks(1, np.random.default_rng(0))


def test_an_environment_without_a_step_and_without_rules_for_rows_says_what_it_needs() -> None:
    class Idle(MetaEnv):
        task_set = ((),)

        def __init__(self) -> None:
            self.action_space = Discrete(2)

    env = Idle()
    half = type("Half", (Idle,), {"step": lambda env, action: (0, 0.0, False, False, {})})()
    for ask in (lambda: env.step(0), lambda: env.reset(seed=0), lambda: env.batch(2, 1), lambda: half.reset(seed=0)):
        with pytest.raises(
            EnvError, match=r"(Idle|Half) lacks step or reset, and has no row_batch; define `step` and `reset`, or"
        ):
            ask()


def test_single_task_env_has_one_task_without_parameters() -> None:
    env = SingleTask(make_env(EnvConfig(name="point-corner")))
    assert env.sample_tasks(3, np.random.default_rng(0)).shape == (3, 0)
    assert env.task.shape == (0,)


def test_a_base_class_after_meta_env_keeps_its_rules_and_old_names_are_refused() -> None:
    class Tasks(MetaEnv, CartPoleEnv):
        task_set = ((),)
        rows = 5  # a name of the environment's own

    env = Tasks()
    observation, _ = env.reset(seed=1)
    plain = CartPoleEnv()
    assert (observation == plain.reset(seed=1)[0]).all()
    assert (env.step(1)[0] == plain.step(1)[0]).all()
    assert env.batch(2, 1) is None
    with pytest.raises(EnvError, match="Late lists MetaEnv before PointRobot; list PointRobot first"):
        type("Late", (MetaEnv, PointRobot), {})


def test_until_a_task_is_set_it_is_one_that_is_always_the_same() -> None:
    env = make_env(EnvConfig(name="navigation-2d"))
    assert np.array_equal(env.task, env.sample_tasks(1, np.random.default_rng(0))[0])


def test_a_task_set_within_an_episode_is_the_next_steps() -> None:
    env = make_env(EnvConfig(name="bernoulli-bandit"))
    env.set_task(np.ones(len(env.task_fields)))
    env.reset(seed=0)
    assert env.step(0)[1] == 1
    env.set_task(np.zeros(len(env.task_fields)))
    assert env.step(0)[1] == 0

"""Meta-World's environments, held to the package that they are of."""

import importlib
import importlib.metadata
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("metaworld", reason="`make metaworld` installs it")

from metaloom.pipeline.envs.config import EnvConfig
from metaloom.pipeline.envs.contract import BatchEnv, EnvError
from metaloom.pipeline.envs.metaworld import package
from metaloom.pipeline.envs.metaworld.batch import MetaWorldBatch
from metaloom.pipeline.envs.metaworld.families import MetaWorld
from metaloom.pipeline.envs.metaworld.names import BENCHMARKS, CLASSES, FAMILIES
from metaloom.pipeline.envs.metaworld.oracle import MAX_STEPS, OfficialClass
from metaloom.pipeline.envs.metaworld.package import GOALS_PER_CLASS, benchmark_tasks, official_classes
from metaloom.pipeline.envs.registry import find_env, make_env
from metaloom.pipeline.types import Array

# A target that is a view of the simulator, rewards in float32, one whose model tells its target, one of free objects.
SAMPLE = ("basketball", "drawer-close", "disassemble", "pick-place")
SEED = 5


def all_classes(sample: Sequence[str]) -> list[Any]:
    """The sample, and in sweeps every other class."""
    rest = [name for name in CLASSES if name not in sample]
    return [*sample, *(pytest.param(name, marks=pytest.mark.sweep) for name in rest)]


def tasks_of(names: Sequence[str], goals: int) -> Array:
    return np.array([task for name in names for task in benchmark_tasks((name,), SEED)[:goals]])


def batch_of(num_rows: int, *, visible: bool = False, version: str = "v2", threads: int = 1) -> MetaWorldBatch:
    def official(number: int) -> OfficialClass:
        return OfficialClass(CLASSES[number], goal_visible=visible, reward_version=version)

    return MetaWorldBatch(official, {}, num_rows, threads, "oracle")


def official_env(task: Array, *, visible: bool = False, version: str = "v2") -> tuple[Any, Array]:
    """The package's own environment, set to a task in its own way, and its first observation."""
    cls = official_classes()[CLASSES[int(task[0])]]
    env: Any = cls(reward_function_version=version)
    goal = task[1 : 1 + env._random_reset_space.low.size]
    data = {"env_cls": cls, "rand_vec": goal, "partially_observable": not visible}
    env.set_task(importlib.import_module("metaworld").Task("", pickle.dumps(data)))
    return env, env.reset()[0]


def moves(rng: np.random.Generator, *shape: int) -> Array:
    """Actions [*shape, 4], some out of range."""
    return rng.uniform(-1.5, 1.5, (*shape, 4)).astype(np.float32)


def require_official(batch: BatchEnv, tasks: Array, num_steps: int, **settings: Any) -> None:
    """Observations, rewards and info are the package's, bit for bit, also where only some rows are stepped."""
    rng = np.random.default_rng(0)
    firsts = batch.reset(tasks, np.arange(len(tasks), dtype=np.uint64))
    envs = []
    for task, first in zip(tasks, firsts, strict=True):
        env, observation = official_env(task, **settings)
        assert np.array_equal(observation, first)
        envs.append(env)
    for t in range(num_steps):
        rows = np.flatnonzero(rng.uniform(size=len(tasks)) < 0.7) if t % 2 else np.arange(len(tasks))
        actions = moves(rng, len(rows))
        step = batch.step(actions.astype(np.float64), rows)
        for i, row in enumerate(rows):
            observation, reward, _, truncated, info = envs[row].step(actions[i])
            assert np.array_equal(step.observations[i], observation)
            assert step.reward_terms["reward"][i] == np.float64(reward)
            assert {name: step.facts[name][i] for name in info} == info
            assert step.truncated[i] == truncated


@pytest.mark.parametrize("name", all_classes(SAMPLE))
def test_rows_are_the_official_environment_bit_for_bit(name: str) -> None:
    tasks = tasks_of([name], 3)
    require_official(batch_of(3, threads=2), tasks, 60)


@pytest.mark.parametrize("name", all_classes(("reach",)))
def test_so_are_those_with_rewards_v1_and_a_goal_that_is_seen(name: str) -> None:
    tasks = tasks_of([name], 2)
    require_official(batch_of(2, visible=True, version="v1"), tasks, 40, visible=True, version="v1")


def test_neither_earlier_episodes_nor_the_order_of_rows_make_a_difference() -> None:
    rng, tasks = np.random.default_rng(1), tasks_of(SAMPLE, 2)
    batch, order = batch_of(len(tasks)), rng.permutation(len(tasks))
    everyone, seeds, actions = np.arange(len(tasks)), np.zeros(len(tasks), np.uint64), moves(rng, 8, len(tasks))
    batch.reset(tasks[::-1].copy(), seeds)
    for action in actions[::-1]:
        batch.step(action, everyone)
    require_official(batch, tasks[order], 10)
    batch.reset(tasks[order], seeds)
    shuffled = [batch.step(action[order], everyone) for action in actions]
    batch.reset(tasks, seeds)
    for action, there in zip(actions, shuffled, strict=True):
        here = batch.step(action, everyone)
        assert np.array_equal(here.observations[order], there.observations)
        assert all(np.array_equal(here.facts[name][order], there.facts[name]) for name in here.facts)


@pytest.mark.filterwarnings("ignore:Constant")
def test_an_episode_is_truncated_after_500_steps_and_tells_when_it_first_succeeded() -> None:
    tasks = tasks_of(["reach"], 2)
    batch = batch_of(2)
    batch.reset(tasks, np.zeros(2, np.uint64))
    expert, goal = expert_of("reach"), official_env(tasks[0])[0]._target_pos
    observation, success = batch.reset(tasks, np.zeros(2, np.uint64))[0], []
    for t in range(MAX_STEPS):
        shown = np.concatenate([observation[:36], goal])
        step = batch.step(np.stack([expert.get_action(shown), np.zeros(4)]), np.arange(2))
        observation = step.observations[0]
        success.append(bool(step.facts["success"][0]))
        assert step.truncated.all() == (t == MAX_STEPS - 1)
    assert any(success)
    assert batch.state.shape == (2, 35)
    assert step.facts["steps_until_success"].tolist() == [success.index(True) + 1, MAX_STEPS]


def expert_of(name: str) -> Any:
    """The package's scripted policy of a class."""
    policies = importlib.import_module("metaworld.policies")
    return policies.ENV_POLICY_MAP[f"{name}-v3"]()


def successes(name: str, goals: int) -> Array:
    """[goals], whether the scripted expert succeeds, through the adapter."""
    tasks = tasks_of([name], goals)
    batch = batch_of(goals, visible=True)
    observations = batch.reset(tasks, np.zeros(goals, np.uint64))
    experts, succeeded = [expert_of(name) for _ in tasks], np.zeros(goals, np.bool_)
    for _ in range(MAX_STEPS):
        rows = np.flatnonzero(~succeeded)
        actions = np.stack([experts[row].get_action(observations[row]) for row in rows])
        step = batch.step(actions, rows)
        observations[rows] = step.observations
        succeeded[rows] = step.facts["success"]
        if succeeded.all() or step.truncated.any():
            break
    return succeeded


@pytest.mark.filterwarnings("ignore:Constant")
@pytest.mark.parametrize("name", ["reach", "drawer-close", "pick-place"])
def test_the_packages_scripted_experts_succeed(name: str) -> None:
    assert successes(name, 3).all()


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore:Constant")
def test_the_packages_scripted_experts_succeed_in_all_classes() -> None:
    rates = {name: successes(name, 6).mean() for name in CLASSES}
    assert np.mean(list(rates.values())) >= 0.98, rates


def test_names_of_classes_and_benchmarks_are_the_packages() -> None:
    about = importlib.import_module("metaworld.env_dict")
    plain = lambda names: tuple(name.removesuffix("-v3") for name in names)  # noqa: E731
    assert plain(about.ALL_V3_ENVIRONMENTS) == CLASSES
    for name, split in BENCHMARKS.items():
        found = getattr(about, f"{name.upper()}_V3")
        parts = (found["train"], found["test"]) if name.startswith("ml") else (found, ())
        assert tuple(map(plain, parts)) == split
    assert all(find_env(name).__name__ == path.partition(":")[2] for name, path in FAMILIES.items())
    assert len(FAMILIES) == 54
    of_one_class = [f"metaworld-ml1-{name}" for name in CLASSES]
    assert [*FAMILIES] == [*sorted(of_one_class), *(f"metaworld-{name}" for name in BENCHMARKS)]


def drawn_by_the_package(tasks: Sequence[Any]) -> list[tuple[float, ...]]:
    goals = [(task.env_name.removesuffix("-v3"), pickle.loads(task.data)["rand_vec"]) for task in tasks]
    return [(float(CLASSES.index(name)), *goal, *[0.0] * (6 - len(goal))) for name, goal in goals]


def test_goals_are_those_of_the_packages_benchmarks_and_nobodys_generator_is_touched() -> None:
    before = np.random.get_state()[1]  # noqa: NPY002 - the generator that must be left alone
    env = make_env(EnvConfig(name="metaworld-ml1-lever-pull", options={"benchmark_seed": 3}))
    assert np.array_equal(np.random.get_state()[1], before)  # noqa: NPY002
    official = importlib.import_module("metaworld").ML1("lever-pull-v3", seed=3)
    assert [*(env.task_set or ())] == drawn_by_the_package(official.train_tasks)
    assert [*(env.test_task_set or ())] == drawn_by_the_package(official.test_tasks)
    assert len(official.train_tasks) == GOALS_PER_CLASS


@pytest.mark.sweep
@pytest.mark.parametrize("name", BENCHMARKS)
def test_so_are_those_of_the_benchmarks_of_several_classes(name: str) -> None:
    env = make_env(EnvConfig(name=f"metaworld-{name}", options={"benchmark_seed": 7}))
    official = getattr(importlib.import_module("metaworld"), name.upper())(seed=7)
    assert [*(env.task_set or ())] == drawn_by_the_package(official.train_tasks)
    assert [*(env.test_task_set or ())] == drawn_by_the_package(official.test_tasks)


def test_a_multi_task_benchmark_shows_the_goal_and_which_class_it_is() -> None:
    env = make_env(EnvConfig(name="metaworld-mt10"))
    names = [name for name, _ in env.observation_components or ()]
    assert env.observation_space.shape == (49,)
    assert names[39:] == [f"is_{name}" for name in BENCHMARKS["mt10"].train]
    task = np.array(env.task_set)[120]  # the third class, pick-place, which has 50 goals like those before it
    env.set_task(task)
    observation, _ = env.reset(seed=0)
    official, first = official_env(task, visible=True)
    assert np.array_equal(observation[:39], first)
    assert np.array_equal(observation[36:39], official._target_pos)
    assert observation[39:].tolist() == [0, 0, 1, 0, 0, 0, 0, 0, 0, 0]
    assert env.test_task_set is None


def test_classes_to_test_with_are_others_than_those_to_train_on() -> None:
    env = make_env(EnvConfig(name="metaworld-ml10"))
    classes, fields = env.task_classes, [field.name for field in env.task_fields]
    assert classes is not None
    of = [classes.of(np.array(tasks), fields) for tasks in (env.task_set, env.test_task_set)]
    assert env.test_task_set == benchmark_tasks(BENCHMARKS["ml10"].test, 0)
    assert [np.bincount(c, minlength=15).tolist() for c in of] == [[50] * 10 + [0] * 5, [0] * 10 + [50] * 5]
    assert [[classes.names[c] for c in classes.among(c)] for c in of] == [*map(list, BENCHMARKS["ml10"])]


def moved_pads(name: str, goals: int, num_steps: int) -> float:
    """By how much a reward of the scripted expert differs from what it were had the pads' places at the start stayed.

    The package keeps views of the simulator's memory as `init_left_pad` and `init_right_pad`.
    """
    largest = 0.0
    for task in tasks_of([name], goals):
        (env, observation), expert = official_env(task, visible=True), expert_of(name)
        views = {pad: getattr(env, pad) for pad in ("init_left_pad", "init_right_pad")}
        assert all(np.shares_memory(view, env.data.xpos) for view in views.values())
        first = {pad: view.copy() for pad, view in views.items()}
        for _ in range(num_steps):
            action = np.asarray(expert.get_action(observation), np.float32)
            observation, reward, _, _, _ = env.step(action)
            vars(env).update(first)
            meant, _ = env.evaluate_state(env._last_stable_obs, action)
            vars(env).update(views)
            largest = max(largest, abs(float(meant) - float(reward)))
    return largest


PADS = {"door-lock": 0.44, "pick-place": 0.09, "push-back": 0.13, "soccer": 1.03, "sweep-into": 2.88, "sweep": 4.02}
"""As on the page, of four goals and 300 steps."""


@pytest.mark.filterwarnings("ignore:Constant")
def test_initial_pads_move_with_the_hand_as_in_the_package() -> None:
    assert moved_pads("sweep", 1, 40) > 0.01
    assert moved_pads("basketball", 1, 10) == 0


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore:Constant")
@pytest.mark.parametrize("name", CLASSES)
def test_rewards_of_six_classes_differ_by_as_much_as_the_page_says(name: str) -> None:
    page = Path(__file__).parents[3] / "docs" / "environments" / "metaworld.md"
    largest = moved_pads(name, 4, 300)
    assert largest == pytest.approx(PADS.get(name, 0), rel=0.1)
    assert name not in PADS or f"{name} {PADS[name]}" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ([0, 0, 0.6, 0.02, 0.1, 0.8, 0.2], r"got the class 0; expected one of 30 \(pick-place\)"),
        ([30, 0, 0.6, 0.02, 0.1, 0.8, 2], "got the goal .* for pick-place; expected 6 numbers from .* to "),
        ([30, 0, 0.6], "expected 7 finite numbers"),
    ],
)
def test_a_task_that_the_benchmark_has_not_is_refused(task: list[float], message: str) -> None:
    with pytest.raises(EnvError, match=message):
        make_env(EnvConfig(name="metaworld-ml1-pick-place")).set_task(np.array(task))


def test_a_goal_that_the_package_would_draw_again_forever_is_refused() -> None:
    official = OfficialClass("push", goal_visible=False, reward_version="v2")
    low = official.space.low
    for limit in (low, official.space.high):
        assert np.array_equal(official.goal_of(limit), limit)
    close = np.array([0.0, 0.7, low[2], 0.0, 0.8, low[5]])
    with pytest.raises(EnvError, match="push does not accept the goal"):
        official.start(close)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reward_version": "v3"}, "reward_version is 'v3'; expected v1 or v2"),
        ({"benchmark_seed": -1}, "benchmark_seed is -1; expected an integer"),
        ({"benchmark_seed": 2**32 - 1}, "benchmark_seed is 4294967295; expected an integer"),
        ({"benchmark_seed": 1.5}, "benchmark_seed is 1.5; expected an integer"),
        ({"benchmark_seed": True}, "benchmark_seed is True; expected an integer"),
        ({"render_mode": "human"}, "render_mode is 'human'"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(EnvError, match=message):
        make_env(EnvConfig(name="metaworld-ml1-reach", options=options))


def test_a_film_shows_the_arm_at_its_speed_with_the_table_in_the_middle() -> None:
    env, (official, _) = make_env(EnvConfig(name="metaworld-ml1-reach")), official_env(tasks_of(["reach"], 1)[0])
    env.reset(seed=0)
    assert env.metadata["render_fps"] == round(1 / official.dt)
    *_, camera = env.unwrapped.scene()  # pyright: ignore[reportAttributeAccessIssue]
    assert camera.lookat.tolist() == [0.0, 0.55, 0.15]
    assert (camera.azimuth, camera.elevation, camera.distance) == (-45, -25, 1.4)


def test_the_weld_of_the_hand_is_the_one_that_the_package_writes() -> None:
    model = OfficialClass("reach", goal_visible=False, reward_version="v2").model
    assert model.eq_data.tolist() == [[0, 0, 0, 0, 0, 0, -1, 0, 0, 0, 5, 0]]


@pytest.mark.parametrize("found", [None, "3.0.0"])
def test_without_the_package_the_name_says_how_to_install_it(found: str | None, monkeypatch: Any) -> None:
    def version(name: str) -> str:
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(package, "version", version)
    package.official_classes.cache_clear()
    benchmark_tasks.cache_clear()
    with pytest.raises(EnvError, match=r"metaworld is .*install version 3\.1\.1: `make metaworld`.*--no-deps"):
        make_env(EnvConfig(name="metaworld-ml1-reach"))


def test_a_step_before_the_first_reset_is_refused() -> None:
    with pytest.raises(EnvError, match="call reset first"):
        make_env(EnvConfig(name="metaworld-ml1-reach")).step(np.zeros(4))


def test_every_family_is_a_subclass_with_a_data_sheet() -> None:
    for name in FAMILIES:
        cls = find_env(name)
        assert issubclass(cls, MetaWorld)
        assert cls.__doc__

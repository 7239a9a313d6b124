import numpy as np
import pytest

from metaloom.pipeline.envs import ENVS
from metaloom.pipeline.envs.ant import PearlAntDir
from metaloom.pipeline.envs.config import EnvConfig
from metaloom.pipeline.envs.contract import EnvError, MetaEnv
from metaloom.pipeline.envs.registry import make_env
from metaloom.pipeline.envs.task_sets import AlongX, draw_directions, draw_on_disk

SIZES = {
    "pearl-cheetah-vel": (100, 30),
    "pearl-ant-dir": (100, 30),
    "pearl-ant-goal": (150, 30),
    "pearl-humanoid-dir": (100, 30),
    "pearl-hopper-rand-params": (40, 10),
    "pearl-walker2d-rand-params": (40, 10),
    "pearl-point-robot": (80, 20),
    "pearl-sparse-point-robot": (80, 20),
}

OBSERVATION_SIZES = {
    "pearl-cheetah-dir": 20,
    "pearl-cheetah-vel": 20,
    "pearl-ant-dir": 27,
    "pearl-ant-goal": 113,
    "pearl-humanoid-dir": 376,
    "pearl-hopper-rand-params": 11,
    "pearl-walker2d-rand-params": 17,
    "pearl-point-robot": 2,
    "pearl-sparse-point-robot": 2,
}


@pytest.mark.parametrize("name", SIZES)
def test_pearls_robots_train_and_test_on_fixed_tasks_that_differ(name: str) -> None:
    state = np.random.get_state()[1]  # noqa: NPY002 - the generator that must be left alone
    env = make_env(EnvConfig(name=name))
    assert np.array_equal(np.random.get_state()[1], state)  # noqa: NPY002
    assert env.task_set is not None
    assert env.test_task_set is not None
    assert (len(env.task_set), len(env.test_task_set)) == SIZES[name]
    assert len({*env.task_set, *env.test_task_set}) == sum(SIZES[name])
    drawn = env.sample_tasks(500, np.random.default_rng(0))
    assert {tuple(task) for task in drawn.tolist()} <= set(env.task_set)


@pytest.mark.parametrize("name", SIZES)
def test_sizes_of_fixed_task_sets_are_options(name: str) -> None:
    env = make_env(EnvConfig(name=name, options={"num_train_tasks": 7, "num_test_tasks": 3}))
    assert env.task_set is not None
    assert env.test_task_set is not None
    assert (len(env.task_set), len(env.test_task_set)) == (7, 3)
    assert {tuple(task) for task in env.sample_tasks(50, np.random.default_rng(0)).tolist()} <= set(env.task_set)
    with pytest.raises(EnvError, match="num_test_tasks must be a positive integer, got 0"):
        make_env(EnvConfig(name=name, options={"num_test_tasks": 0}))


def test_pearls_environments_show_what_pearls_policies_saw() -> None:
    assert {name for name in ENVS if name.startswith("pearl-")} == OBSERVATION_SIZES.keys()
    sizes = {name: make_env(EnvConfig(name=name)).observation_space.shape for name in OBSERVATION_SIZES}
    assert sizes == {name: (size,) for name, size in OBSERVATION_SIZES.items()}


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("pearl-cheetah-vel", (2.634305701041355,)),
        ("pearl-ant-dir", (0.08048353211949223, 0.9967559385614769)),
        ("pearl-humanoid-dir", (0.08048353211949223, 0.9967559385614769)),
        ("pearl-ant-goal", (0.3050349185506083, -0.29337062839188927)),
    ],
)
def test_fixed_tasks_are_those_of_earlier_runs(name: str, first: tuple[float, ...]) -> None:
    tasks = make_env(EnvConfig(name=name)).task_set
    assert tasks is not None
    assert tasks[0] == pytest.approx(first, abs=1e-12)


def test_forward_and_backward_are_two_tasks_to_train_on_and_none_is_held_out() -> None:
    env = PearlAntDir(forward_backward=True)
    assert env.task_set == ((-1.0, 0.0), (1.0, 0.0))
    assert env.test_task_set is None
    assert PearlAntDir().task_set != env.task_set
    drawn = env.sample_tasks(50, np.random.default_rng(0))
    assert {tuple(task) for task in drawn.tolist()} == set(env.task_set)


def test_both_directions_of_pearls_cheetah_are_trained_on() -> None:
    env = make_env(EnvConfig(name="pearl-cheetah-dir"))
    assert (env.task_set, env.test_task_set) == (((-1.0,), (1.0,)), None)


def test_directions_have_length_one_and_any_angle() -> None:
    directions = draw_directions(4000, np.random.default_rng(0))
    assert np.allclose(np.hypot(*directions.T), 1)
    angles = np.arctan2(*directions.T)
    counts, _ = np.histogram(angles, 8, (-np.pi, np.pi))
    assert counts.min() > 400
    assert counts.max() < 600


def test_goals_are_uniform_on_the_disk() -> None:
    places = draw_on_disk(4000, np.random.default_rng(0), radius=3)
    distances = np.hypot(*places.T)
    assert distances.max() <= 3
    # A quarter of the area lies within half the radius.
    assert (distances < 1.5).mean() == pytest.approx(0.25, abs=0.03)
    assert places.mean(axis=0) == pytest.approx([0, 0], abs=0.1)


def test_signs_are_equally_likely() -> None:
    class Walks(AlongX, MetaEnv):
        """A robot without a body."""

    signs = Walks().sample_tasks(2000, np.random.default_rng(0))
    assert set(signs[:, 0]) == {-1.0, 1.0}
    assert abs(signs.mean()) < 0.1

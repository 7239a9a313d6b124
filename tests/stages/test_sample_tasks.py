from types import SimpleNamespace

import numpy as np
import pytest

from metaloom.pipeline.envs.config import EnvConfig
from metaloom.pipeline.envs.contract import EnvError
from metaloom.pipeline.envs.point import Point2DGoal
from metaloom.pipeline.envs.point_pearl import PearlSparsePointRobot
from metaloom.pipeline.envs.registry import make_env
from metaloom.pipeline.tasks.samplers import draw_tasks
from metaloom.stages.sample_tasks import sample_training_tasks


def draw(name: str, iteration: int = 0, num_tasks: int = 200):
    return draw_tasks(make_env(EnvConfig(name=name)), num_tasks=num_tasks, run_seed=5, iteration=iteration)


def test_tasks_follow_from_the_seed_and_the_iteration() -> None:
    assert np.array_equal(draw("half-cheetah-vel").params, draw("half-cheetah-vel").params)
    assert not np.array_equal(draw("half-cheetah-vel").params, draw("half-cheetah-vel", iteration=1).params)


def test_every_iteration_of_every_seed_draws_different_training_tasks_anew() -> None:
    env = PearlSparsePointRobot()

    def drawn(seed: int, iteration: int) -> bytes:
        config = SimpleNamespace(num_tasks=5)
        return sample_training_tasks(env, config, SimpleNamespace(run_seed=seed, iteration=iteration)).params.tobytes()

    assert len({drawn(seed, iteration) for seed in (1, 2) for iteration in range(3)}) == 6
    assert drawn(1, 2) == drawn(1, 2)


def test_columns_carry_the_names_and_units_of_the_task_fields() -> None:
    tasks = draw("point-corner")
    assert tasks.names == ("goal_x", "goal_y")
    assert tasks.units == ("m", "m")
    assert draw("half-cheetah-vel").units == ("m/s",)


def test_ids_name_the_tasks_of_a_finite_set_and_are_minus_one_otherwise() -> None:
    tasks = draw("half-cheetah-dir")
    assert np.array_equal(tasks.params[:, 0], np.where(tasks.ids == 1, 1.0, -1.0))
    assert set(tasks.ids.tolist()) == {0, 1}
    assert set(draw("point-corner").ids.tolist()) == {0, 1, 2, 3}
    assert set(draw("half-cheetah-vel").ids.tolist()) == {-1}
    assert draw("point-2d").ids.tolist() == [0] * 200


def test_directions_are_equally_likely() -> None:
    forward = draw("half-cheetah-dir", num_tasks=4000).ids.mean()
    # 4,000 fair draws: a standard error of 0.5 / sqrt(4000) = 0.0079.
    assert forward == pytest.approx(0.5, abs=4 * 0.0079)


@pytest.mark.parametrize("value", [np.zeros((3, 3)), np.zeros(2), np.full((3, 2), np.inf)])
def test_tasks_of_the_wrong_form_are_refused(value: np.ndarray) -> None:
    class Odd(Point2DGoal):
        def sample_tasks(self, num_tasks: int, rng: np.random.Generator) -> np.ndarray:
            return value

    with pytest.raises(EnvError, match=r"Odd.sample_tasks returned shape .*; expected \(3, 2\) finite numbers"):
        draw_tasks(Odd(), num_tasks=3, run_seed=0, iteration=0)


@pytest.mark.parametrize("name", ["half-cheetah-dir", "half-cheetah-vel", "point-corner"])
def test_balanced_tasks_have_equally_many_of_every_class(name: str) -> None:
    env = make_env(EnvConfig(name=name))
    classes = env.task_classes
    assert classes is not None
    drawn = [draw_tasks(env, num_tasks=25, run_seed=5, iteration=i, balanced=True) for i in (0, 1)]
    for tasks in drawn:
        counts = np.bincount(classes.of(tasks.params, tasks.names), minlength=len(classes.names))
        assert counts.max() - counts.min() == 1
    again = draw_tasks(env, num_tasks=25, run_seed=5, iteration=0, balanced=True)
    assert np.array_equal(drawn[0].params, again.params)
    assert not np.array_equal(drawn[0].params, drawn[1].params)


def test_within_a_class_balanced_tasks_are_distributed_as_those_of_the_environment() -> None:
    tasks = draw_tasks(
        make_env(EnvConfig(name="half-cheetah-vel")), num_tasks=3000, run_seed=5, iteration=0, balanced=True
    )
    within = np.mod(tasks.params[:, 0], 1)  # three classes of width 1, U(0, 1) in each
    # Standard errors of a uniform's mean and of its second moment: 1/√(12 n) and √(4/45 / n).
    assert within.mean() == pytest.approx(1 / 2, abs=4 / np.sqrt(12 * 3000))
    assert np.square(within).mean() == pytest.approx(1 / 3, abs=4 * np.sqrt(4 / 45 / 3000))


def test_balanced_tasks_of_an_environment_without_classes_are_refused() -> None:
    with pytest.raises(EnvError, match="task_sampling is balanced, but Point2DGoal declares no classes of tasks"):
        draw_tasks(Point2DGoal(), num_tasks=3, run_seed=0, iteration=0, balanced=True)

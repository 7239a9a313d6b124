"""Bodies as tasks: what changes, that it really changes, and that nothing adds up."""

import numpy as np
import pytest

from metaloom.pipeline.envs.config import EnvConfig
from metaloom.pipeline.envs.contract import EnvError
from metaloom.pipeline.envs.hopper import HopperRandParams, PearlHopperRandParams
from metaloom.pipeline.envs.random_dynamics import ARRAYS, RandomDynamics
from metaloom.pipeline.envs.registry import make_batch_env, make_env
from metaloom.pipeline.envs.walker2d import PearlWalker2dRandParams, Walker2dRandParams

ROBOTS = (HopperRandParams, Walker2dRandParams)
DERIVED = ("body_subtreemass", "body_invweight0", "dof_invweight0", "dof_M0", "actuator_acc0")
NUM_FIELDS = {HopperRandParams: 34, Walker2dRandParams: 58}

every_robot = pytest.mark.parametrize("robot", ROBOTS)


def ones(env: RandomDynamics) -> np.ndarray:
    return np.ones(len(env.task_fields))


def end_of_a_fixed_rollout(env: RandomDynamics, task: np.ndarray) -> np.ndarray:
    """The state after 60 steps of the same actions, which throw the robot down."""
    env.set_task(task)
    env.reset(seed=0)
    for action in np.random.default_rng(0).uniform(-1, 1, (60, env.model.nu)):
        env.step(action)
    return np.concatenate([env.data.qpos, env.data.qvel])


@every_robot
def test_there_is_a_field_for_every_number_of_the_model_that_is_not_0(robot: type[RandomDynamics]) -> None:
    env = robot()
    names = [field.name for field in env.task_fields]
    assert len(names) == len(set(names)) == NUM_FIELDS[robot]
    assert len(names) == sum(np.count_nonzero(getattr(env.model, array.name)) for array in ARRAYS)


@every_robot
def test_a_field_multiplies_the_number_that_it_names_and_no_other(robot: type[RandomDynamics]) -> None:
    env = robot()
    base = robot()
    base.set_task(ones(base))
    where = {
        "torso_mass": ("body_mass", (base.model.body("torso").id,)),
        "leg_inertia_3": ("body_inertia", (base.model.body("leg").id, 2)),
        "floor_friction_sliding": ("geom_friction", (base.model.geom("floor").id, 0)),
        "foot_friction_rolling": ("geom_friction", (base.model.geom("foot_geom").id, 2)),
        "leg_damping": ("dof_damping", (base.model.joint("leg_joint").dofadr[0],)),
    }
    for name, (array, place) in where.items():
        task = ones(env)
        task[[field.name for field in env.task_fields].index(name)] = 2.0
        env.set_task(task)
        for other in ARRAYS:
            ratio = np.ones_like(getattr(base.model, other.name))
            if other.name == array:
                ratio[place] = 2.0
            assert np.array_equal(getattr(env.model, other.name), ratio * getattr(base.model, other.name))


@every_robot
@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: array.name)
def test_each_array_changes_a_rollout_of_fixed_actions(robot: type[RandomDynamics], array) -> None:
    env = robot()
    changed = ones(env)
    names = [field.name for field in env.task_fields]
    changed[[array.quantity in name for name in names]] = 1.5
    plain = end_of_a_fixed_rollout(env, ones(env))
    assert np.abs(end_of_a_fixed_rollout(env, changed) - plain).max() > 1e-3
    assert np.array_equal(end_of_a_fixed_rollout(env, ones(env)), plain)


@every_robot
def test_what_mujoco_derives_from_masses_follows_them(robot: type[RandomDynamics]) -> None:
    env = robot()
    env.set_task(ones(env))
    total, along_x = env.model.body_subtreemass[1], env.model.dof_M0[0]
    env.set_task(2 * ones(env))
    assert env.model.body_subtreemass[1] == pytest.approx(2 * total)
    assert env.model.dof_M0[0] == pytest.approx(2 * along_x)


@every_robot
def test_nothing_adds_up_over_a_thousand_tasks(robot: type[RandomDynamics]) -> None:
    env, fresh = robot(), robot()
    for task in env.sample_tasks(1000, np.random.default_rng(0)):
        env.set_task(task)
    env.set_task(ones(env))
    fresh.set_task(ones(fresh))
    for name in (*(array.name for array in ARRAYS), *DERIVED):
        assert np.array_equal(getattr(env.model, name), getattr(fresh.model, name)), name


@every_robot
def test_the_first_episode_already_has_the_body_of_its_task(robot: type[RandomDynamics]) -> None:
    env = robot()
    model = robot().model
    assert np.array_equal(env.model.body_mass, model.body_mass)
    assert np.array_equal(env.task, env.sample_tasks(1, np.random.default_rng(0))[0])
    mass = env.model.body("torso").mass[0] / env.task[0]
    env.set_task(ones(env))
    assert env.model.body("torso").mass[0] == pytest.approx(mass)


@every_robot
def test_a_task_in_mid_episode_does_not_move_the_robot(robot: type[RandomDynamics]) -> None:
    env = robot()
    env.reset(seed=0)
    env.step(np.ones(env.model.nu))
    before = env.data.qpos.copy()
    env.set_task(2 * ones(env))
    assert np.array_equal(env.data.qpos, before)


@every_robot
def test_multipliers_span_their_range_evenly_in_the_exponent(robot: type[RandomDynamics]) -> None:
    env = robot()
    tasks = env.sample_tasks(300, np.random.default_rng(0))
    damping = np.array(["damping" in field.name for field in env.task_fields])
    for base, columns in ((1.3, damping), (1.5, ~damping)):
        exponents = np.log(tasks[:, columns]) / np.log(base)
        assert -3 <= exponents.min() < -2.9
        assert 2.9 < exponents.max() <= 3
        # U(-3, 3) has a standard deviation of sqrt(3).
        assert abs(exponents.mean()) < 5 * np.sqrt(3 / exponents.size)


@pytest.mark.parametrize("name", ["hopper-rand-params", "walker2d-rand-params"])
def test_a_used_batch_takes_new_bodies_and_the_old_ones_again(name: str) -> None:
    config = EnvConfig(name=name)
    batch = make_batch_env(config, 3)
    first, second = make_env(config).sample_tasks(6, np.random.default_rng(0)).reshape(2, 3, -1)
    actions = np.random.default_rng(0).normal(0, 8, (20, 3, batch.action_size)).astype(np.float32)

    def episode(tasks: np.ndarray) -> np.ndarray:
        batch.reset(tasks, np.arange(3, dtype=np.uint64))
        return np.array([batch.step(step, np.arange(3)).observations for step in actions])

    once = episode(first)
    assert not np.array_equal(episode(second), once)
    assert np.array_equal(episode(first), once)


@pytest.mark.parametrize("task", [0.0, -1.0])
def test_a_multiplier_that_is_not_positive_is_refused_and_changes_nothing(task: float) -> None:
    env = HopperRandParams()
    mass = env.model.body_mass.copy()
    wrong = ones(env)
    wrong[1] = task
    with pytest.raises(EnvError, match=f"HopperRandParams: thigh_mass of a task is {task}; expected .* above 0"):
        env.set_task(wrong)
    assert np.array_equal(env.model.body_mass, mass)
    batch = env.batch(1, 1)
    assert batch is not None
    with pytest.raises(EnvError, match="thigh_mass"):
        batch.reset(wrong[None], np.zeros(1, np.uint64))


@pytest.mark.parametrize("robot", [PearlHopperRandParams, PearlWalker2dRandParams])
def test_pearls_robots_have_40_bodies_to_train_on_and_10_to_test_with(robot: type[RandomDynamics]) -> None:
    env = robot()
    assert env.task_set is not None
    assert env.test_task_set is not None
    assert (len(env.task_set), len(env.test_task_set)) == (40, 10)
    assert tuple(env.task.tolist()) in env.task_set

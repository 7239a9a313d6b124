import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mujoco  # pyright: ignore[reportMissingTypeStubs]
import numpy as np
import pytest
from mujoco.batch import SimulationError

from metaloom.pipeline.envs.ant import AntDir
from metaloom.pipeline.envs.contact_batch import ContactBatch
from metaloom.pipeline.envs.contract import EnvError
from metaloom.pipeline.envs.humanoid import HumanoidDir


def episode(robot: Any, actions: np.ndarray) -> list[np.ndarray]:
    """All that a batch of five rows gives, of which two rest from the tenth step on."""
    batch = robot.batch(5, 2)
    kept = [batch.reset(np.ones((5, 1)), np.arange(5, dtype=np.uint64))]
    for t, action in enumerate(actions):
        rows = np.arange(5) if t < 10 else np.array([0, 2, 4])
        step = batch.step(action[rows], rows)
        kept += [step.observations, *step.reward_terms.values()]
    return [array.copy() for array in (*kept, batch.state)]


@pytest.mark.parametrize("make", [AntDir, HumanoidDir])
def test_forces_have_the_bits_of_simulations_that_are_stepped_one_by_one(make: Any) -> None:
    model = make().model
    batch, rng = ContactBatch(model, 3, 2), np.random.default_rng(0)
    batch.reset(stage=mujoco.mjtStage.mjSTAGE_NONE.value)
    ctrl, qpos, forces = (batch.bind(name) for name in ("ctrl", "qpos", "cfrc_ext"))
    singles = [mujoco.MjData(model) for _ in range(3)]
    for t in range(200):
        rows = np.arange(3) if t < 100 else np.array([0, 2])
        ctrl[rows] = rng.uniform(-0.4, 0.4, (len(rows), model.nu))
        batch.step(rows, 2)
        for row in rows:
            singles[row].ctrl[:] = ctrl[row]
            mujoco.mj_step(model, singles[row], 2)
            mujoco.mj_rnePostConstraint(model, singles[row])
        assert all(np.array_equal(forces[row], data.cfrc_ext) for row, data in enumerate(singles))
        assert all(np.array_equal(qpos[row], data.qpos) for row, data in enumerate(singles))
    assert forces.any()


@pytest.mark.parametrize("make", [AntDir, HumanoidDir])
def test_rows_do_not_depend_on_the_number_of_threads_or_of_rows(make: Any) -> None:
    robot, tasks, seeds = make(), np.ones((7, 1)), np.arange(7, dtype=np.uint64)
    actions = np.random.default_rng(0).uniform(-0.4, 0.4, (40, 7, robot.model.nu))

    def last(rows: np.ndarray, num_threads: int) -> np.ndarray:
        batch = robot.batch(len(rows), num_threads)
        batch.reset(tasks[rows], seeds[rows])
        everyone = np.arange(len(rows))
        return np.concatenate([batch.step(action[rows], everyone).observations for action in actions], axis=1)

    whole = last(np.arange(7), 1)
    for num_threads in (2, 3):
        assert np.array_equal(last(np.arange(7), num_threads), whole)
    assert np.array_equal(last(np.array([5]), 1), whole[[5]])
    assert np.array_equal(last(np.array([6, 1, 3]), 2), whole[[6, 1, 3]])


def test_the_state_can_be_written_and_what_follows_from_it_cannot() -> None:
    batch = ContactBatch(AntDir().model, 3, 1)
    batch.bind("qpos")[1, 2] = 5.0
    batch.forward()
    assert batch.bind("xpos")[:, 1, 2].tolist() == [0.75, 5.0, 0.75]
    for name in ("xpos", "cfrc_ext"):
        with pytest.raises(ValueError, match="read-only"):
            batch.bind(name)[0] = 1


def test_a_robot_with_contact_forces_has_one_model() -> None:
    varied = type("Varied", (AntDir,), {"write_models": lambda robot, batch, tasks: None})
    with pytest.raises(EnvError, match="Varied has contact forces and a model per row; use only one of them"):
        varied().batch(2, 1)


def test_arrays_keep_the_simulations_that_they_show() -> None:
    heights = ContactBatch(AntDir().model, 200, 1).bind("qpos")[:, 2]
    gc.collect()
    others = [ContactBatch(AntDir().model, 200, 1) for _ in range(3)]
    for batch in others:
        batch.bind("qpos")[:] = 9
    assert (heights == 0.75).all()


def test_closing_a_batch_of_robots_frees_its_simulations() -> None:
    batch: Any = AntDir().batch(3, 2)
    simulations = weakref.ref(batch._batch._handle)
    batch.close()
    gc.collect()
    assert simulations() is None


def test_batches_of_several_threads_do_not_disturb_each_other() -> None:
    robot = AntDir()
    actions = np.random.default_rng(0).uniform(-0.4, 0.4, (40, 5, robot.model.nu))
    expected = episode(robot, actions)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: episode(robot, actions), range(12)))
    for arrays in found:
        assert all(np.array_equal(a, b) for a, b in zip(arrays, expected, strict=True))


def test_a_fault_of_the_physics_names_the_rows() -> None:
    xml = "<mujoco><worldbody><body name='a'><freejoint/><geom size='1'/></body></worldbody></mujoco>"
    weld = "<equality><weld body1='a'/></equality></mujoco>"
    model = mujoco.MjModel.from_xml_string(xml.replace("</mujoco>", weld))
    model.eq_type[:] = 99  # which no constraint has
    batch = ContactBatch(model, 3, 1)
    with pytest.raises(SimulationError, match=r"MuJoCo raised in 2 of 2 simulations \(0, 2\); simulation 0: .+"):
        batch.step(np.array([0, 2]))


@pytest.mark.parametrize("num_rows", [0, -1])
def test_a_batch_that_mujoco_cannot_make_is_refused_with_its_reason(num_rows: int) -> None:
    with pytest.raises(
        MemoryError, match=f"MuJoCo cannot make a batch of {num_rows} simulations: nsim must be positive"
    ):
        ContactBatch(AntDir().model, num_rows, 1)

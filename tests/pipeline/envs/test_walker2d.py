from pathlib import Path

import numpy as np
import pytest

from metaloom.pipeline.envs.contract import EnvError
from metaloom.pipeline.envs.hopper import HopperRandParams
from metaloom.pipeline.envs.mujoco_robot import Motion, MujocoRobot
from metaloom.pipeline.envs.walker2d import Walker2dDir, Walker2dRandParams, Walker2dVel


@pytest.fixture
def gymnasiums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Gymnasium's own classes, which import imageio and let MuJoCo log into the working folder."""
    pytest.importorskip("imageio", reason="gymnasium's MuJoCo envs import it")
    monkeypatch.chdir(tmp_path)
    from gymnasium.envs.mujoco.hopper_v5 import HopperEnv
    from gymnasium.envs.mujoco.walker2d_v5 import Walker2dEnv

    return {"walker2d": Walker2dEnv, "hopper": HopperEnv}


def compare(ours: MujocoRobot, theirs, *, seed: int, num_steps: int = 80) -> bool:
    """Tell if the episode ended by falling."""
    observation, _ = ours.reset(seed=seed)
    assert np.array_equal(observation, theirs.reset(seed=seed)[0])
    terminated = False
    for action in np.random.default_rng(seed).uniform(-1, 1, (num_steps, ours.model.nu)):
        observation, reward, terminated, truncated, info = ours.step(action)
        expected, expected_reward, *ended, expected_info = theirs.step(action)
        assert np.array_equal(observation, expected)
        assert [terminated, truncated] == ended[:2]
        assert info["reward_terms"]["run"] == expected_info["reward_forward"]
        # Gymnasium pays nothing for the step that ends in a fall.
        assert reward == pytest.approx(expected_reward + terminated, abs=1e-12)
        if terminated:
            break
    return terminated


@pytest.mark.parametrize(("model", "file"), [("original", "walker2d.xml"), ("v5", "walker2d_v5.xml")])
def test_walks_and_falls_as_gymnasiums_walker_of_the_same_model_bit_for_bit(gymnasiums, model, file) -> None:
    theirs = gymnasiums["walker2d"](xml_file=file, frame_skip=8)
    ours = Walker2dDir(model)
    ours.set_task(np.array([1.0]))
    assert all([compare(ours, theirs, seed=seed) for seed in range(3)])


def test_a_body_of_ones_is_gymnasiums_walker_bit_for_bit(gymnasiums) -> None:
    ours = Walker2dRandParams()
    ours.set_task(np.ones(len(ours.task_fields)))
    assert all([compare(ours, gymnasiums["walker2d"](xml_file="walker2d.xml"), seed=seed) for seed in range(2)])


def test_a_body_of_ones_is_gymnasiums_hopper_bit_for_bit(gymnasiums) -> None:
    ours = HopperRandParams()
    ours.set_task(np.ones(len(ours.task_fields)))
    assert all([compare(ours, gymnasiums["hopper"](), seed=seed) for seed in range(3)])


def motion(*, forward: float = 0.0, **state: float) -> Motion:
    qpos = np.zeros((1, 9))
    qpos[0, :3] = forward, state.get("height", 1.25), state.get("angle", 0.0)
    return Motion(np.zeros((1, 9)), qpos, np.zeros((1, 9)), np.array([[1.0, -1.0, 0.5, 0.0, 0.0, 0.5]]), dt=0.016)


def test_rewards_by_hand() -> None:
    step = motion(forward=0.032)
    backward = Walker2dDir().reward_terms(step, np.array([[-1.0]]))
    assert {name: float(term[0]) for name, term in backward.items()} == pytest.approx(
        {"run": -2.0, "alive": 1.0, "control": -0.0025}
    )
    to_speed = Walker2dVel().reward_terms(step, np.array([[2.5]]))
    assert {name: float(term[0]) for name, term in to_speed.items()} == pytest.approx(
        {"run": -0.5, "alive": 15.0, "control": -0.0025}
    )


@pytest.mark.parametrize(
    ("height", "angle", "fallen"),
    [(1.25, 0, False), (0.8, 0, True), (2.0, 0, True), (1.25, 1.0, True), (1.25, -1.0, True), (1.99, -0.99, False)],
)
def test_falls_by_height_or_angle(height: float, angle: float, fallen: bool) -> None:
    assert Walker2dDir().terminal(motion(height=height, angle=angle), np.ones((1, 1))).tolist() == [fallen]


def test_a_position_that_is_not_a_number_counts_as_fallen() -> None:
    assert Walker2dDir().terminal(motion(height=np.nan), np.ones((1, 1))).tolist() == [True]


def test_control_steps_last_as_long_as_documented() -> None:
    assert Walker2dDir().dt == Walker2dVel().dt == pytest.approx(0.016)
    assert Walker2dRandParams().dt == pytest.approx(0.008)


def test_velocities_lie_between_0_and_10() -> None:
    tasks = Walker2dVel().sample_tasks(500, np.random.default_rng(0))
    assert 0 <= tasks.min() < 0.3
    assert 9.7 < tasks.max() <= 10


def test_the_models_differ_in_the_friction_of_the_right_foot_only() -> None:
    original, v5 = Walker2dDir().model, Walker2dDir("v5").model
    changed = np.argwhere(original.geom_friction != v5.geom_friction)
    assert changed.tolist() == [[original.geom("foot_geom").id, 0]]
    assert original.geom("foot_geom").friction[0] == 0.9
    assert v5.geom("foot_geom").friction[0] == 1.9


def test_an_unknown_model_is_refused() -> None:
    with pytest.raises(EnvError, match="Walker2dVel: model is 'v4'; expected one of original, v5"):
        Walker2dVel("v4")  # pyright: ignore[reportArgumentType]

import os
import subprocess
import sys
from pathlib import Path

import mujoco
import numpy as np
import pytest

from metaloom.pipeline.envs.config import EnvConfig
from metaloom.pipeline.envs.half_cheetah import HalfCheetah, HalfCheetahDir, HalfCheetahVel
from metaloom.pipeline.envs.mujoco_robot import Motion
from metaloom.pipeline.envs.registry import make_env

GOLDEN = Path(__file__).parents[2] / "golden"


@pytest.mark.parametrize("direction", [-1, 1])
def test_agrees_with_the_original_to_1e_6(direction: int) -> None:
    golden = np.load(GOLDEN / "env_half_cheetah_rand_direc.npz")
    values = {
        name: golden[f"dir{direction:+d}_{name}"] for name in ("qpos0", "qvel0", "policy_actions", "obs", "rewards")
    }
    terms = {name: golden[f"dir{direction:+d}_reward_{name}"] for name in ("run", "ctrl")}
    env = make_env(EnvConfig(name="half-cheetah-dir"))
    env.set_task(np.array([direction]))
    env.reset(seed=0)
    robot = env.unwrapped
    assert isinstance(robot, HalfCheetah)
    robot.data.qpos[:], robot.data.qvel[:] = values["qpos0"], values["qvel0"]
    mujoco.mj_forward(robot.model, robot.data)
    for t, action in enumerate(values["policy_actions"]):
        observation, reward, _, _, info = env.step(action)
        # MuJoCo 2.3.6 there and 4 here: the difference grows to 6e-11 in 30 steps.
        np.testing.assert_allclose(observation, values["obs"][t + 1], atol=1e-6, rtol=0)
        assert reward == pytest.approx(values["rewards"][t], abs=1e-6)
        assert info["reward_terms"]["run"] == pytest.approx(terms["run"][t], abs=1e-6)
        assert info["reward_terms"]["control"] == pytest.approx(terms["ctrl"][t], abs=1e-6)


def test_starts_and_moves_as_gymnasiums_half_cheetah_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("imageio", reason="gymnasium's MuJoCo envs import it")
    from gymnasium.envs.mujoco.half_cheetah_v5 import HalfCheetahEnv

    # MuJoCo logs a deprecation in gymnasium's model file into the working folder.
    monkeypatch.chdir(tmp_path)
    theirs, ours = HalfCheetahEnv(ctrl_cost_weight=0.05), HalfCheetahDir()
    ours.set_task(np.array([1.0]))
    observation, _ = ours.reset(seed=11)
    assert np.array_equal(observation, theirs.reset(seed=11)[0])
    for action in np.random.default_rng(0).uniform(-1, 1, (100, 6)):
        observation, reward, terminated, truncated, _ = ours.step(action)
        expected, expected_reward, *ended, _ = theirs.step(action)
        assert np.array_equal(observation, expected)
        assert reward == pytest.approx(expected_reward, abs=1e-12)
        assert [terminated, truncated] == ended[:2]


def test_rewards_by_hand() -> None:
    before, after = np.zeros((1, 9)), np.zeros((1, 9))
    after[0, 0] = 0.1
    motion = Motion(before, after, np.zeros((1, 9)), np.array([[1.0, -1.0, 0.5, 0.0, 0.0, 0.5]]), dt=0.05)
    control = pytest.approx([-0.05 * 2.5])
    backward = HalfCheetahDir().reward_terms(motion, np.array([[-1.0]]))
    assert backward["run"] == pytest.approx([-2.0])
    assert backward["control"] == control
    to_speed = HalfCheetahVel().reward_terms(motion, np.array([[2.5]]))
    assert to_speed["run"] == pytest.approx([-0.5])
    assert to_speed["control"] == control


def test_a_control_step_is_a_twentieth_of_a_second() -> None:
    assert HalfCheetahDir().dt == pytest.approx(0.05)


def test_velocities_lie_between_0_and_3() -> None:
    tasks = HalfCheetahVel().sample_tasks(500, np.random.default_rng(0))
    assert 0 <= tasks.min() < 0.1
    assert 2.9 < tasks.max() <= 3


def test_a_picture_shows_the_robot() -> None:
    code = (
        "from metaloom.pipeline.envs.half_cheetah import HalfCheetahDir; "
        "robot = HalfCheetahDir(render_mode='rgb_array'); robot.reset(seed=0); picture = robot.render(); "
        "robot.close(); assert picture.shape == (240, 320, 3) and picture.std() > 10, picture"
    )
    root = Path(__file__).parents[3]
    # In a process of its own, since the graphics library is chosen when MuJoCo is first imported.
    environment = {**os.environ, "MUJOCO_GL": "egl"}
    result = subprocess.run([sys.executable, "-c", code], cwd=root, env=environment, capture_output=True, text=True)
    if result.returncode and "AssertionError" not in result.stderr:
        pytest.skip("this machine cannot draw without a screen: " + result.stderr[-200:])
    assert result.returncode == 0, result.stderr


def test_rendering_without_a_mode_gives_nothing_and_an_unknown_mode_is_refused() -> None:
    assert HalfCheetahDir().render() is None
    with pytest.raises(ValueError, match="render_mode is 'human'"):
        HalfCheetahDir(render_mode="human")

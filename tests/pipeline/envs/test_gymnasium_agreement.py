"""Robots in batch against gymnasium's own envs, one by one, from the same states with the same actions."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from metaloom.pipeline.envs.ant import AntDir, AntDir2D, AntGoal, PearlAntDir
from metaloom.pipeline.envs.half_cheetah import HalfCheetahDir, PearlCheetahDir
from metaloom.pipeline.envs.humanoid import Humanoid, HumanoidDir
from metaloom.pipeline.envs.mujoco_robot import Motion, MujocoRobot
from metaloom.pipeline.envs.swimmer import SwimmerVel

NUM_ROWS, NUM_STEPS = 5, 120

# gymnasium's name for each of our reward terms.
ANT = {"run": "reward_forward", "control": "reward_ctrl", "contact": "reward_contact"}


def ant_env(**options: Any) -> Any:
    from gymnasium.envs.mujoco.ant_v5 import AntEnv

    return AntEnv(**options)


def humanoid_env(**options: Any) -> Any:
    from gymnasium.envs.mujoco.humanoid_v5 import HumanoidEnv

    return HumanoidEnv(**options)


def swimmer_env(**options: Any) -> Any:
    from gymnasium.envs.mujoco.swimmer_v5 import SwimmerEnv

    return SwimmerEnv(**options)


CASES = {
    "ant-dir": (lambda: AntDir(obs_style="v5"), lambda: ant_env(healthy_z_range=(0.0, 1.0)), [1.0], ANT),
    "ant-goal": (
        lambda: AntGoal(obs_style="v5"),
        lambda: ant_env(
            ctrl_cost_weight=0.1,
            terminate_when_unhealthy=False,
            exclude_current_positions_from_observation=False,
        ),
        [1.0, 2.0],
        {"control": "reward_ctrl", "contact": "reward_contact"},
    ),
    "ant-dir-2d": (
        lambda: AntDir2D(obs_style="pearl"),
        lambda: ant_env(healthy_z_range=(0.0, 1.0), include_cfrc_ext_in_observation=False),
        [1.0, 0.0],
        {"control": "reward_ctrl", "contact": "reward_contact"},
    ),
    "pearl-ant-dir": (
        PearlAntDir,
        lambda: ant_env(include_cfrc_ext_in_observation=False),
        [1.0, 0.0],
        {"control": "reward_ctrl", "contact": "reward_contact"},
    ),
    "humanoid-dir": (
        lambda: HumanoidDir(obs_style="v5"),
        humanoid_env,
        [1.0],
        {"control": "reward_ctrl", "contact": "reward_contact", "run": "reward_forward"},
    ),
    "swimmer-vel": (SwimmerVel, swimmer_env, [0.15], {"control": "reward_ctrl"}),
}


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_a_batch_equals_gymnasiums_envs_bit_for_bit(
    name: str, num_threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("imageio", reason="gymnasium's MuJoCo envs import it")
    make, make_theirs, task, terms = CASES[name]
    # MuJoCo may log warnings of a model file into the working folder.
    monkeypatch.chdir(tmp_path)
    ours, theirs = make(), [make_theirs() for _ in range(NUM_ROWS)]
    batch = ours.batch(NUM_ROWS, num_threads)
    assert batch is not None
    seeds = np.arange(10, 10 + NUM_ROWS, dtype=np.uint64)
    observations = batch.reset(np.tile(task, (NUM_ROWS, 1)), seeds)
    for row, env in enumerate(theirs):
        assert np.array_equal(observations[row], env.reset(seed=int(seeds[row]))[0])
    low, high = ours.action_space.low, ours.action_space.high  # pyright: ignore[reportAttributeAccessIssue]
    rng = np.random.default_rng(0)
    for t in range(NUM_STEPS):
        rows = np.arange(NUM_ROWS) if t < 60 else np.array([0, 3])
        actions = rng.uniform(low, high, (len(rows), len(low)))
        step = batch.step(actions, rows)
        for i, row in enumerate(rows):
            observation, _, terminated, _, info = theirs[row].step(actions[i])
            assert np.array_equal(step.observations[i], observation), (t, row)
            for ours_name, their_name in terms.items():
                assert step.reward_terms[ours_name][i] == info[their_name], (t, row, ours_name)
            assert step.terminated[i] == terminated


@pytest.mark.parametrize("angle", [0.0, 1.0, 4.0])
def test_a_direction_is_paid_for_the_velocity_along_it(angle: float) -> None:
    ours, theirs = AntDir2D(), ant_env()
    ours.set_task(np.array([np.cos(angle), np.sin(angle)]))
    ours.reset(seed=1)
    theirs.reset(seed=1)
    for action in np.random.default_rng(0).uniform(-1, 1, (20, 8)):
        terms, info = ours.step(action)[4]["reward_terms"], theirs.step(action)[4]
        expected = np.cos(angle) * info["x_velocity"] + np.sin(angle) * info["y_velocity"]
        assert terms["run"] == pytest.approx(expected, rel=1e-12)
        assert terms["survive"] == 1


def test_the_swimmer_is_paid_for_being_near_its_speed() -> None:
    ours, theirs = SwimmerVel(), swimmer_env()
    ours.set_task(np.array([0.12]))
    ours.reset(seed=1)
    theirs.reset(seed=1)
    for action in np.random.default_rng(0).uniform(-1, 1, (20, 2)):
        terms, info = ours.step(action)[4]["reward_terms"], theirs.step(action)[4]
        assert terms["run"] == -abs(info["x_velocity"] - 0.12)
    speeds = ours.sample_tasks(500, np.random.default_rng(0))
    assert 0.1 <= speeds.min() < 0.101
    assert 0.199 < speeds.max() <= 0.2


def test_the_ant_is_paid_for_its_distance_to_the_goal_along_both_axes() -> None:
    ours, theirs = AntGoal(), ant_env()
    ours.set_task(np.array([-1.0, 2.0]))
    ours.reset(seed=1)
    theirs.reset(seed=1)
    for action in np.random.default_rng(0).uniform(-1, 1, (20, 8)):
        terms = ours.step(action)[4]["reward_terms"]
        theirs.step(action)
        x, y, _ = theirs.data.body("torso").xpos
        assert terms["distance"] == pytest.approx(-(abs(x + 1) + abs(y - 2)), rel=1e-12)
        assert set(terms) == {"distance", "control", "contact"}


STYLES: list[tuple[Callable[..., MujocoRobot], dict[str, int]]] = [
    (AntDir, {"promp": 111, "pearl": 27, "v5": 105}),
    (AntDir2D, {"promp": 111, "pearl": 27, "v5": 105}),
    (AntGoal, {"promp": 113, "pearl": 113, "v5": 107}),
    (HumanoidDir, {"promp": 376, "pearl": 376, "v5": 348}),
    (SwimmerVel, {"promp": 8, "v5": 8}),
    (HalfCheetahDir, {"promp": 17, "pearl": 20, "v5": 17}),
]


@pytest.mark.parametrize(("robot", "sizes"), STYLES)
def test_each_style_has_its_stated_size_and_is_named_by_the_robot(
    robot: Callable[..., MujocoRobot], sizes: dict[str, int]
) -> None:
    for style, size in sizes.items():
        env: Any = robot(obs_style=style)
        assert env.observation_space.shape == (size,)
        assert env.obs_style == style
        assert env.reset(seed=0)[0].shape == (size,)


@pytest.mark.parametrize("robot", [AntDir, HumanoidDir])
def test_promps_style_is_that_of_v5_and_zeros_of_the_world(robot: Callable[..., Any]) -> None:
    promp, v5 = robot(), robot(obs_style="v5")
    promp.reset(seed=0)
    v5.reset(seed=0)
    rng = np.random.default_rng(0)
    for _ in range(60):
        action = promp.action_space.high * rng.uniform(-1, 1, promp.action_space.shape)
        whole, part = promp.step(action)[0], v5.step(action)[0]
    joints = promp.model.nq - 2 + promp.model.nv
    bodies = promp.model.nbody
    blocks = {AntDir: [(6 * bodies, 6)], HumanoidDir: [(10 * bodies, 10), (6 * bodies, 6), (23, 6), (6 * bodies, 6)]}
    kept, start = [whole[:joints]], joints
    for size, zeros in blocks[robot]:
        assert not whole[start : start + zeros].any()
        kept.append(whole[start + zeros : start + size])
        start += size
    assert start == len(whole)
    assert np.array_equal(np.concatenate(kept), part)


def test_pearls_cheetah_also_sees_where_its_torso_is() -> None:
    ours = PearlCheetahDir()
    plain = HalfCheetahDir()
    ours.reset(seed=3)
    plain.reset(seed=3)
    for action in np.random.default_rng(0).uniform(-1, 1, (30, 6)):
        observation, expected = ours.step(action)[0], plain.step(action)[0]
        assert np.array_equal(observation[:17], expected)
        assert np.array_equal(observation[17:], ours.data.body("torso").xpos)


def test_contact_forces_are_zero_right_after_a_reset_and_not_later() -> None:
    ant = AntDir()
    for _ in range(2):
        assert not ant.reset(seed=0)[0][27:].any()
        assert np.abs([ant.step(np.ones(8))[0][27:] for _ in range(60)]).max() == 1


def test_a_humanoid_on_the_ground_pays_at_most_ten_for_contacts() -> None:
    assert Humanoid.max_contact_cost == 10
    robot = HumanoidDir()
    bodies = robot.model.nbody
    fields = {"xipos": np.zeros((2, bodies, 3)), "cfrc_ext": np.zeros((2, bodies, 6))}
    fields["cfrc_ext"][:, 3, 5] = [1e3, 1e6]
    motion = Motion(*(np.zeros((2, n)) for n in (24, 24, 23, 17)), dt=0.015, derived_before=fields, derived=fields)
    assert robot.reward_terms(motion, np.ones((2, 1)))["contact"] == pytest.approx([-0.5, -10])


@pytest.mark.parametrize(
    ("robot", "heights", "ended"),
    [
        (AntDir, [-0.01, 0.0, 0.1, 1.0, 1.01, np.nan, np.inf], [1, 0, 0, 0, 1, 1, 1]),
        (AntGoal, [-5.0, 5.0], [0, 0]),
        (PearlAntDir, [0.19, 0.2, 1.0, 1.01], [1, 0, 0, 1]),
        (HumanoidDir, [0.99, 1.0, 1.5, 2.0, 2.01, np.nan], [1, 0, 0, 0, 1, 1]),
        (SwimmerVel, [-5.0], [0]),
    ],
)
def test_a_robot_falls_outside_its_band_of_heights(
    robot: Callable[..., MujocoRobot], heights: list[float], ended: list[int]
) -> None:
    env, n = robot(), len(heights)
    qpos = np.zeros((n, env.model.nq))
    qpos[:, 2] = heights
    motion = Motion(qpos, qpos, np.zeros((n, env.model.nv)), np.zeros((n, env.model.nu)), dt=0.05)
    assert env.terminal(motion, np.zeros((n, 1))).astype(int).tolist() == ended


def test_an_ant_with_a_speed_that_is_not_finite_has_fallen() -> None:
    env = AntDir()
    qpos, qvel = np.full((2, env.model.nq), 0.5), np.zeros((2, env.model.nv))
    qvel[1, 4] = np.inf
    assert env.terminal(Motion(qpos, qpos, qvel, np.zeros((2, 8)), dt=0.05), np.ones((2, 1))).tolist() == [False, True]


def test_a_style_that_a_robot_does_not_offer_is_refused() -> None:
    with pytest.raises(ValueError, match="SwimmerVel: obs_style is 'pearl'; expected one of promp, v5"):
        SwimmerVel(obs_style="pearl")
    with pytest.raises(ValueError, match="AntDir: obs_style is 'gym'; expected one of promp, pearl, v5"):
        AntDir(obs_style="gym")  # pyright: ignore[reportArgumentType]

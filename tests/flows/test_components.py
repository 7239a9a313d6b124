"""Names and units of an environment's numbers: declared, checked before a run, stored, and used where they are read."""

import numpy as np
import pytest
from env_names import ENV_NAMES

from metaloom import storage
from metaloom.flows.commands.train import train
from metaloom.flows.rollouts.workers import Backend
from metaloom.pipeline.envs.config import EnvConfig
from metaloom.pipeline.envs.contract import Component, EnvError
from metaloom.pipeline.envs.facts import component_facts
from metaloom.pipeline.envs.registry import make_env

pytestmark = pytest.mark.usefixtures("warm")


def facts(name, **options):
    return component_facts(make_env(EnvConfig(name=name, options=options)))


@pytest.mark.parametrize("name", ENV_NAMES)
def test_every_built_in_environment_names_all_its_numbers(name):
    env = make_env(EnvConfig(name=name))
    found = component_facts(env)
    assert len(found["observation"]["names"]) == env.observation_space.shape[0]
    assert len(found["action"]["names"]) == sum(env.action_space.shape)  # of discrete actions none


def test_a_robots_names_are_those_of_its_joints_bodies_and_motors():
    cheetah = facts("half-cheetah-dir", obs_style="pearl")["observation"]
    joints = ["rooty", "bthigh", "bshin", "bfoot", "fthigh", "fshin", "ffoot"]
    names = ["rootz", *joints, *(f"{joint}_velocity" for joint in ("rootx", "rootz", *joints))]
    assert cheetah["names"] == [*names, "torso_x", "torso_y", "torso_z"]
    assert cheetah["units"] == ["m", *["rad"] * 7, "m/s", "m/s", *["rad/s"] * 7, "m", "m", "m"]
    assert facts("walker2d-dir")["action"]["names"][:2] == ["thigh_joint", "leg_joint"]


def test_clipped_velocities_and_contact_forces_are_named_where_they_stand():
    hopper = make_env(EnvConfig(name="hopper-rand-params"))
    names = [name for name, _ in hopper.observation_components]
    robot = hopper.unwrapped
    robot.data.qvel[:] = np.arange(robot.model.nv)
    assert robot._observation()[names.index("foot_joint_velocity")] == robot.model.joint("foot_joint").dofadr[0]
    ant = facts("ant-dir")["observation"]
    torso = ant["names"].index("torso_contact_torque_x")
    assert ant["units"][torso : torso + 6] == ["N m"] * 3 + ["N"] * 3
    assert torso == 13 + 14 + 6


def test_robots_of_gymnasium_are_named_where_they_show_joints_alone():
    assert facts("Hopper-v5") == facts("hopper-rand-params")
    assert facts("InvertedPendulum-v5")["observation"]["names"][0] == "slider"
    assert "observation" not in facts("Ant-v5")
    assert facts("Ant-v5")["action"] == facts("ant-dir")["action"]
    assert component_facts(make_env(EnvConfig(name="CartPole-v1", action_scale=None))) == {}


def test_a_users_declarations_are_stored_and_name_columns_and_coordinates(tmp_path, tiny_config):
    env = {"name": "small_envs:Tank"}
    config = tiny_config(env=env, iterations=1)
    train(config, tmp_path / "run", backend=Backend(workers=0))
    run = storage.open_run(tmp_path / "run")
    assert run.components("observation") == {"level": "m", "inflow": "m3/s"}
    table = run.steps(columns=["t", "observation.inflow", "action.*"], steps=0, task=1)
    assert table.column_names == ["t", "observation.inflow", "action.valve"]
    assert table.schema.field("observation.inflow").metadata == {b"unit": b"m3/s"}
    episodes = run[0].rollouts(0, task=1)
    assert table["observation.inflow"].to_pylist() == episodes.observations[0, :, :10, 1].reshape(-1).tolist()
    assert table["action.valve"].to_pylist() == episodes.actions[0].reshape(-1).tolist()
    with pytest.raises(ValueError, match=r"no columns \['observation.depth'\]; .* and observation.level"):
        run.steps(columns=["observation.depth"])
    data = run[0].xarray(0)
    assert data["observations"].sel(observation="inflow").shape == (4, 3, 11)
    assert data["observation_unit"].values.tolist() == ["m", "m3/s"]


@pytest.mark.parametrize(
    ("name", "message"),
    [("Short", "got 1 components; expected 2, one for each number"), ("Twice", "invalid name 'level'")],
)
def test_wrong_declarations_are_refused_before_a_run_starts(tmp_path, tiny_config, name, message):
    with pytest.raises(EnvError, match=rf"{name}.observation_components: {message}"):
        train(tiny_config(env={"name": f"small_envs:{name}"}), tmp_path / "run", backend=Backend(workers=0))
    assert not (tmp_path / "run").exists()


def test_a_component_without_a_unit_is_a_pure_number():
    assert Component("angle") == ("angle", "1")

"""Robots of each kind in the whole loop: trained, stored, computed again to the bit."""

import numpy as np
import pytest

from metaloom import storage
from metaloom.flows.commands.replay import replay
from metaloom.flows.commands.train import train
from metaloom.flows.rollouts.workers import Backend
from metaloom.pipeline.envs.registry import make_env


@pytest.mark.parametrize("env", ["hopper-rand-params", "pearl-walker2d-rand-params", "pearl-sparse-point-robot"])
def test_a_run_keeps_its_tasks_by_name_and_replays_bit_for_bit(tmp_path, tiny_config, env):
    config = tiny_config(env=env, iterations=2, max_episode_steps=12)
    train(config, tmp_path / "run", backend=Backend(workers=0))
    assert storage.verify_run(tmp_path / "run") == []
    assert all(outcome.identical for outcome in replay(tmp_path / "run"))
    tasks = storage.open_run(tmp_path / "run")[1].tasks()
    robot = make_env(config.env)
    assert tasks.names == tuple(field.name for field in robot.task_fields)
    for task, place in zip(tasks.params, tasks.ids, strict=True):
        assert place == -1 if robot.task_set is None else np.array_equal(robot.task_set[place], task)


def test_a_run_says_what_its_robot_observed_though_nobody_asked(tmp_path, tiny_config):
    explicit = {"name": "ant-dir", "options": {"obs_style": "promp"}}
    for name, env in (("plain", "ant-dir"), ("explicit", explicit)):
        config = tiny_config(env=env, iterations=1, num_tasks=2, episodes_per_task=2, max_episode_steps=5)
        train(config, tmp_path / name, backend=Backend(workers=0))
    plain, asked = (storage.open_run(tmp_path / name) for name in ("plain", "explicit"))
    assert plain.config["env"] == {
        **explicit,
        "action_scale": 10.0,
        "diagnostics": False,
        "facts": {},
        "observed": None,
        "copies": "kept",
        "seed_bits": 64,
        "witness": False,
        "integer_observations": False,
        "wrappers": [],
    }
    assert plain.info["config_digest"] == asked.info["config_digest"]
    assert plain[0].rollouts(0).observations.shape[-1] == 111

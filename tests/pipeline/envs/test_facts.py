"""Recorded facts of an environment: its class, every option whether given or not, and its sizes."""

import json
import sys

import numpy as np
import pytest
from env_names import ENV_NAMES

from metaloom.pipeline.envs.config import EnvConfig
from metaloom.pipeline.envs.facts import env_facts
from metaloom.pipeline.envs.registry import make_env


def facts(name, action_scale=10.0, **options):
    config = EnvConfig(name=name, options=options, action_scale=action_scale)
    return env_facts(config, make_env(config))


def test_options_that_were_left_out_are_told_as_well():
    assert facts("ant-dir") == {
        "class": "metaloom.pipeline.envs.ant:AntDir",
        "options": {"obs_style": "promp"},
        "observation_size": 111,
        "action_size": 8,
        "actions_taken": {"dtype": "float64", "low": [-1.0] * 8, "high": [1.0] * 8},
    }
    assert facts("ant-dir", obs_style="pearl")["options"] == {"obs_style": "pearl"}


def test_a_gymnasium_env_is_told_with_the_options_of_its_registration_and_of_its_class():
    hopper = facts("Hopper-v5", forward_reward_weight=2.0)
    assert hopper["class"] == "gymnasium.envs.mujoco.hopper_v5:HopperEnv"
    assert (hopper["options"]["forward_reward_weight"], hopper["options"]["frame_skip"]) == (2.0, 4)
    assert hopper["options"]["healthy_z_range"] == [0.7, "inf"]
    assert facts("FrozenLake8x8-v1", None)["options"]["map_name"] == "8x8"
    assert (facts("FrozenLake8x8-v1", None)["observation_size"], facts("CartPole-v1", None)["num_choices"]) == (64, 2)


@pytest.mark.parametrize("name", ENV_NAMES)
def test_all_of_it_is_plain_json_and_the_options_make_the_same_environment(name):
    found = facts(name, None)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    again = make_env(EnvConfig(name=name, options=found["options"]))
    assert again.observation_space.shape == (found["observation_size"],)


WHERE = np.array([1.0, np.nan])


class Odd(type(make_env(EnvConfig(name="CartPole-v1", action_scale=None)).unwrapped)):
    """Has defaults that JSON does not know."""

    def __init__(self, where=WHERE, draw=json.dumps, render_mode=None):
        super().__init__()


def test_defaults_that_json_does_not_know_are_told_in_words(monkeypatch):
    monkeypatch.setitem(sys.modules, "odd_envs", type("m", (), {"Odd": Odd}))
    options = facts("odd_envs:Odd", None)["options"]
    assert options == {"where": [1.0, "nan"], "draw": "a function"}

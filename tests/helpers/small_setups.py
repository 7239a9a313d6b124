"""What an algorithm is built for, in small, for tests of algorithms and of their kernels."""

from collections.abc import Mapping
from typing import Any

from metaloom.pipeline.algorithms.contract import Setup
from metaloom.pipeline.baselines import BaselineConfig
from metaloom.pipeline.estimation.config import ProcessingConfig
from metaloom.pipeline.policies import PolicyConfig

O, A, CHOICES = 3, 2, 4
DISCRETE_ACTIONS: Mapping[str, Any] = {"action_size": 0, "num_actions": CHOICES}


def small_setup(policy: PolicyConfig, **changes: Any) -> Setup:
    """O numbers to observe and A to choose in [-1, 1], or one of CHOICES with `**DISCRETE_ACTIONS`."""
    setup = {
        "observation_shape": (O,),
        "observation_scale": 1.0,
        "action_size": A,
        "num_actions": 0,
        "env_name": "test",
        "max_episode_steps": 10,
        "policy": policy,
        "baseline": BaselineConfig(name="zero"),
        "processing": ProcessingConfig(discount=0.9),
        "device": "cpu",
        "sparse_rewards": lambda rewards: rewards,
    }
    return Setup(**(setup | changes))

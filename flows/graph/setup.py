"""What a run's learner is built for."""

import numpy as np
from gymnasium.spaces import Box, Discrete

from metaloom.pipeline.algorithms.contract import Setup
from metaloom.pipeline.config.run import RunConfig
from metaloom.pipeline.envs.contract import MetaEnv

BYTE_SCALE = 255.0


def learner_setup(config: RunConfig, env: MetaEnv) -> Setup:
    """The sizes of a run's environment, and the sections of its settings."""
    observations, actions = env.observation_space, env.action_space
    return Setup(
        observation_shape=observations.shape or (),
        observation_scale=BYTE_SCALE if observations.dtype == np.uint8 else 1.0,
        action_size=actions.shape[0] if isinstance(actions, Box) else 0,
        num_actions=int(actions.n) if isinstance(actions, Discrete) else 0,
        env_name=config.env.name,
        max_episode_steps=config.max_episode_steps,
        policy=config.policy,
        baseline=config.baseline,
        processing=config.processing,
        device="cpu",
        sparse_rewards=env.sparse_rewards,
    )

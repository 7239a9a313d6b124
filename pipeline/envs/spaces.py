"""The sizes of an environment's spaces, as policies need them."""

import math
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete

from metaloom.pipeline.nn.spec import Spaces, is_image


def spaces_of(env: gymnasium.Env[Any, Any]) -> Spaces:
    """Read the sizes of an environment as `make_env` gives it."""
    observations, actions = env.observation_space, env.action_space
    assert isinstance(observations, Box), "PolicyActions has made one vector of others"
    discrete = isinstance(actions, Discrete)
    return Spaces(
        observation_shape=observations.shape,
        observation_scale=_scale(observations),
        action_size=0 if discrete else math.prod(actions.shape or ()),
        num_actions=int(actions.n) if discrete else 0,
    )


def _scale(observations: Box) -> float:
    """Return the largest value of images, such as 255 for bytes; 1 for other observations, which stay as they are."""
    high = float(np.max(observations.high, initial=0))
    in_bytes = observations.dtype == np.uint8
    # The largest number of a type says that there is no bound.
    scale = high if 0 < high < np.iinfo(np.int32).max else 1.0
    return scale if is_image(observations.shape, 255.0 if in_bytes else 1.0) else 1.0

"""A Gaussian policy whose mean is a network and whose standard deviation does not depend on the state."""

import math
from collections.abc import Mapping

import numpy as np
from torch import Tensor

from metaloom.pipeline.nn.distributions import DiagGaussian
from metaloom.pipeline.nn.networks import build_network
from metaloom.pipeline.nn.spec import Spaces
from metaloom.pipeline.policies.config import PolicyConfig
from metaloom.pipeline.policies.contract import Policy
from metaloom.pipeline.policies.inference import MEAN_NETWORK
from metaloom.pipeline.types import Params

LOG_STD = "log_std"


class GaussianPolicy(Policy):
    """For continuous actions; `extra_size` numbers stand behind an observation. See Policy.

    Attributes:
        action_size: A.
        config: options of the standard deviation.
    """

    def __init__(self, spaces: Spaces, config: PolicyConfig, extra_size: int = 0) -> None:
        self.action_size, self.config = spaces.action_size, config
        spec = config.network_spec(spaces, spaces.action_size, extra_size=extra_size)
        self.network = build_network(MEAN_NETWORK, spec)

    def initialize(self, rng: np.random.Generator) -> Params:
        """Draw float32 parameters: those of the mean network in order, then log_std [A]."""
        params = self.network.initialize(rng)
        params[LOG_STD] = np.full(self.action_size, math.log(self.config.init_std), np.float32)
        return params

    def learned(self, params: Mapping[str, object]) -> tuple[str, ...]:
        """Names of the parameters that adaptation and meta-training change, in order."""
        return tuple(name for name in params if self.config.learn_std or name != LOG_STD)

    def distribution(self, params: Mapping[str, Tensor], observations: Tensor) -> DiagGaussian:
        """Return the distribution: mean [..., N, A], log_std [..., 1, A] with the floor of min_std applied."""
        return self.head(self.network(params, observations), params[LOG_STD])

    def head(self, mean: Tensor, log_std: Tensor) -> DiagGaussian:
        """Return the distribution of actions given the network's output and the parameter log_std [..., A]."""
        # The reference clamps on some paths only (acting and per-task losses see the raw value); here it is one rule.
        return DiagGaussian(mean, log_std.clamp(min=math.log(self.config.min_std)).unsqueeze(-2))

    def recorded(self, behavior: Mapping[str, Tensor]) -> DiagGaussian:
        """Rebuild the distribution of actions that acted from what was recorded of it."""
        return DiagGaussian(**behavior)

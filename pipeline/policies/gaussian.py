"""A Gaussian policy whose mean is a network and whose standard deviation does not depend on the state."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from metaloom.pipeline.nn.distributions import DiagGaussian
from metaloom.pipeline.nn.networks import Network, build_network
from metaloom.pipeline.policies.config import PolicyConfig
from metaloom.pipeline.policies.inference import MEAN_NETWORK
from metaloom.pipeline.types import Params

LOG_STD = "log_std"


@dataclass(frozen=True)
class GaussianPolicy:
    """Functions of explicit parameters; holds no parameters itself.

    Attributes:
        observation_size: O.
        action_size: A.
        config: sizes and bounds.
        observation_shape: of one observation as the environment gives it; (O,) if not said.
        observation_scale: what observations are divided by.
        network: of the means.
    """

    observation_size: int
    action_size: int
    config: PolicyConfig
    observation_shape: tuple[int, ...] = ()
    observation_scale: float = 1.0

    network: Network = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        shape = self.observation_shape or (self.observation_size,)
        spec = self.config.network_spec(shape, self.action_size, observation_scale=self.observation_scale)
        object.__setattr__(self, "network", build_network(MEAN_NETWORK, spec))

    def initialize(self, rng: np.random.Generator) -> Params:
        """Draw float32 parameters: those of the mean network in order, then log_std [A]."""
        params = self.network.initialize(rng)
        params[LOG_STD] = np.full(self.action_size, math.log(self.config.init_std), np.float32)
        return params

    def learned(self, params: Mapping[str, object]) -> tuple[str, ...]:
        """Names of the parameters that adaptation and meta-training change, in order."""
        return tuple(name for name in params if self.config.learn_std or name != LOG_STD)

    def distribution(self, params: Mapping[str, Tensor], observations: Tensor) -> DiagGaussian:
        """Return the distribution of actions: mean [..., N, A], log_std [..., 1, A] with the floor of min_std applied.

        Args:
            params: by name, all with or all without a leading task axis B.
            observations: [B, N, O] or [N, O] accordingly.
        """
        return self.head(self.network(params, observations), params[LOG_STD])

    def head(self, mean: Tensor, log_std: Tensor) -> DiagGaussian:
        """Return the distribution of actions given the network's output and the parameter log_std [..., A]."""
        # The reference clamps on some paths only (acting and per-task losses see the raw value); here it is one rule.
        return DiagGaussian(mean, log_std.clamp(min=math.log(self.config.min_std)).unsqueeze(-2))

    def recorded(self, behavior: Mapping[str, Tensor]) -> DiagGaussian:
        """Rebuild the distribution of actions that acted from what was recorded of it."""
        return DiagGaussian(**behavior)

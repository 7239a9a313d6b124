"""A Gaussian policy whose mean is a tanh network and whose standard deviation does not depend on the state."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from metaloom.pipeline.kernels.linearization import LinearizedMLP
from metaloom.pipeline.nn.distributions import DiagGaussian
from metaloom.pipeline.nn.mlp import initialize_mlp, mlp
from metaloom.pipeline.policies.config import PolicyConfig
from metaloom.pipeline.policies.inference import MEAN_NETWORK
from metaloom.pipeline.types import Array, Params

LOG_STD = "log_std"


@dataclass(frozen=True)
class GaussianPolicy:
    """Functions of explicit parameters; holds no parameters itself.

    Attributes:
        observation_size: O.
        action_size: A.
        config: sizes and bounds.
    """

    observation_size: int
    action_size: int
    config: PolicyConfig

    def initialize(self, rng: np.random.Generator) -> Params:
        """Float32 parameters by name: the layers of the mean network in order, then log_std [A]."""
        params = initialize_mlp(MEAN_NETWORK, self.observation_size, self.config.hidden_sizes, self.action_size, rng)
        params[LOG_STD] = np.full(self.action_size, math.log(self.config.init_std), np.float32)
        return params

    def learned(self, params: Mapping[str, object]) -> tuple[str, ...]:
        """Names of the parameters that adaptation and meta-training change, in order."""
        return tuple(name for name in params if self.config.learn_std or name != LOG_STD)

    def distribution(self, params: Mapping[str, Tensor], observations: Tensor) -> DiagGaussian:
        """Actions' distribution: mean [..., N, A], log_std [..., 1, A] with the floor log(min_std) applied.

        Args:
            params: by name, all with or all without a leading task axis B.
            observations: [B, N, O] or [N, O] accordingly.
        """
        mean = mlp(MEAN_NETWORK, len(self.config.hidden_sizes), params, observations)
        return self.head(mean, params[LOG_STD])

    def head(self, mean: Tensor, log_std: Tensor) -> DiagGaussian:
        """The actions' distribution from the network's output and the parameter log_std [..., A]."""
        # The reference clamps on some paths only (acting and per-task losses see the raw value); here it is one rule.
        return DiagGaussian(mean, log_std.clamp(min=math.log(self.config.min_std)).unsqueeze(-2))

    def linearize(self, params: Mapping[str, Array], observations: Array) -> LinearizedMLP:
        """Derivatives of the mean network at params [b, ...] and observations [b, N, O]."""
        return LinearizedMLP(MEAN_NETWORK, len(self.config.hidden_sizes), params, observations)

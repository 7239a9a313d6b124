"""A categorical policy whose logits are a tanh network."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from metaloom.pipeline.nn.mlp import initialize_mlp
from metaloom.pipeline.policies.config import PolicyConfig
from metaloom.pipeline.policies.inference import LOGITS_NETWORK
from metaloom.pipeline.types import Params


@dataclass(frozen=True)
class CategoricalPolicy:
    """Functions of explicit parameters; holds no parameters itself.

    Attributes:
        observation_size: O.
        num_actions: actions to choose from.
        config: sizes.
    """

    observation_size: int
    num_actions: int
    config: PolicyConfig

    def initialize(self, rng: np.random.Generator) -> Params:
        """Float32 parameters by name: the layers of the network in order."""
        return initialize_mlp(LOGITS_NETWORK, self.observation_size, self.config.hidden_sizes, self.num_actions, rng)

    def learned(self, params: Mapping[str, object]) -> tuple[str, ...]:
        """Names of the parameters that learning changes, in order: all."""
        return tuple(params)

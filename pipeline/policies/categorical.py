"""A categorical policy whose logits are a network."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from metaloom.pipeline.nn.distributions import Categorical
from metaloom.pipeline.nn.networks import Network, build_network
from metaloom.pipeline.policies.config import PolicyConfig
from metaloom.pipeline.policies.inference import LOGITS_NETWORK
from metaloom.pipeline.types import Params


@dataclass(frozen=True)
class CategoricalPolicy:
    """Functions of explicit parameters; holds no parameters itself.

    Attributes:
        observation_size: O.
        num_actions: discrete actions.
        config: sizes.
        observation_shape: of one observation as the environment gives it; (O,) if not said.
        observation_scale: what observations are divided by.
        network: of the logits.
    """

    observation_size: int
    num_actions: int
    config: PolicyConfig
    observation_shape: tuple[int, ...] = ()
    observation_scale: float = 1.0

    network: Network = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        shape = self.observation_shape or (self.observation_size,)
        spec = self.config.network_spec(shape, self.num_actions, observation_scale=self.observation_scale)
        object.__setattr__(self, "network", build_network(LOGITS_NETWORK, spec))

    def initialize(self, rng: np.random.Generator) -> Params:
        """Draw float32 parameters: those of the network in order."""
        return self.network.initialize(rng)

    def learned(self, params: Mapping[str, object]) -> tuple[str, ...]:
        """Names of the parameters that learning changes, in order: all."""
        return tuple(params)

    def distribution(self, params: Mapping[str, Tensor], observations: Tensor) -> Categorical:
        """Return the distribution of actions [..., N].

        Args:
            params: by name, all with or all without a leading task axis B.
            observations: [B, N, O] or [N, O] accordingly.
        """
        return Categorical.of_logits(self.network(params, observations))

    def recorded(self, behavior: Mapping[str, Tensor]) -> Categorical:
        """Rebuild the distribution of actions that acted from what was recorded of it."""
        return Categorical(**behavior)

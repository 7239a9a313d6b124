"""The contract of policies: action distributions as functions of observations and explicit parameters."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Protocol

import numpy as np
from torch import Tensor

from metaloom.pipeline.nn.distributions import Distribution
from metaloom.pipeline.nn.networks import Network
from metaloom.pipeline.nn.spec import Spaces
from metaloom.pipeline.policies.config import PolicyConfig
from metaloom.pipeline.types import Params


class Policy(ABC):
    """Base class for policies, which are functions of explicit parameters.

    Attributes:
        network: Network whose outputs parameterize the distributions.
    """

    network: Network

    @abstractmethod
    def __init__(self, spaces: Spaces, config: PolicyConfig) -> None: ...

    def initialize(self, rng: np.random.Generator) -> Params:
        """Draw initial float32 parameters; return arrays keyed by name, in order. The default is the network's."""
        return self.network.initialize(rng)

    def learned(self, params: Mapping[str, object]) -> tuple[str, ...]:
        """Return the names of the parameters that learning updates, in order. The default is all."""
        return tuple(params)

    @abstractmethod
    def distribution(self, params: Mapping[str, Tensor], observations: Tensor) -> Distribution:
        """Return the action distributions for observations.

        Args:
            params: Parameters, keyed by name, either all with a leading task axis B or all without.
            observations: Flattened observations, [B, N, O] with a task axis, otherwise [N, O].
        """

    @abstractmethod
    def recorded(self, behavior: Mapping[str, Tensor]) -> Distribution:
        """Rebuild the behavior policy's distributions from recorded arrays.

        Args:
            behavior: Arrays of `EpisodeBatch.behavior` with their steps in one axis, [..., N, ...], keyed by name. An
                array without steps, such as a Gaussian's `log_std` [B, A], has an axis of length 1 instead: [B, 1, A].
        """


class OwnPolicy(Policy):
    """Base class for custom policies, `policy=module:Class`; see Policy."""

    @abstractmethod
    def distribution(self, params: Mapping[str, Tensor], observations: Tensor) -> "OwnDistribution": ...


class OwnDistribution(Distribution, Protocol):
    """Action distributions [N] of a custom policy, with the methods that rollouts need to sample and record them."""

    def sample(self) -> Tensor:
        """Sample actions, [N, A] float or [N] int64, with torch's global generator, which is seeded before the call."""
        ...

    def mode(self) -> Tensor:
        """Return the most likely actions, or a substitute for them, [N, A] float or [N] int64."""
        ...

    def parameters(self) -> Mapping[str, Tensor]:
        """Return the arrays from which `Policy.recorded` rebuilds the distributions, keyed by name, [N, ...] each."""
        ...

"""The contract of policies: action distributions as functions of observations and explicit parameters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

import numpy as np
from torch import Tensor

from metaloom.pipeline.nn.distributions import Distribution
from metaloom.pipeline.types import Params

if TYPE_CHECKING:
    from metaloom.pipeline.nn.networks import Network
    from metaloom.pipeline.nn.spec import Spaces
    from metaloom.pipeline.policies.config import PolicyConfig


class Policy(ABC):
    """A policy as functions of explicit parameters.

    Attributes:
        network: Network whose outputs parameterize the distributions.
    """

    network: Network

    @abstractmethod
    def __init__(self, spaces: Spaces, config: PolicyConfig) -> None: ...

    def initialize(self, rng: np.random.Generator) -> Params:
        """Draw float32 parameters by name, in order; by default the network's."""
        return self.network.initialize(rng)

    def learned(self, params: Mapping[str, object]) -> tuple[str, ...]:
        """Return the names of the parameters that learning changes, in order; by default all."""
        return tuple(params)

    @abstractmethod
    def distribution(self, params: Mapping[str, Tensor], observations: Tensor) -> Distribution:
        """Return the distributions of actions given observations.

        Args:
            params: Parameters by name, all with or all without a leading task axis B.
            observations: Flattened, [B, N, O] or [N, O] accordingly.
        """

    @abstractmethod
    def recorded(self, behavior: Mapping[str, Tensor]) -> Distribution:
        """Rebuild the distributions that acted from the arrays that rollouts recorded, by name, [..., N, ...]."""


class OwnPolicy(Policy):
    """Base class of custom policies, `policy=module:Class`; see Policy."""

    @abstractmethod
    def distribution(self, params: Mapping[str, Tensor], observations: Tensor) -> OwnDistribution: ...


class OwnDistribution(Distribution, Protocol):
    """Distributions [N] of a custom policy, which rollouts sample from and record."""

    def sample(self) -> Tensor:
        """Draw actions, [N, A] float or [N] int64, with torch's global generator, which is seeded before the call."""
        ...

    def mode(self) -> Tensor:
        """Return the most likely actions, or a substitute, [N, A] float or [N] int64."""
        ...

    def parameters(self) -> Mapping[str, Tensor]:
        """Return the arrays from which `Policy.recorded` rebuilds the distributions: name -> [N, ...]."""
        ...

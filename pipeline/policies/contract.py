"""The contract of policies: distributions of actions as functions of observations and explicit parameters."""

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
    """Functions of explicit parameters; holds none itself.

    Attributes:
        network: Network from whose outputs distributions are made.
    """

    network: Network

    @abstractmethod
    def __init__(self, spaces: Spaces, config: PolicyConfig) -> None: ...

    def initialize(self, rng: np.random.Generator) -> Params:
        """Draw float32 parameters by name, in order, the same for the same generator; by default the network's."""
        return self.network.initialize(rng)

    def learned(self, params: Mapping[str, object]) -> tuple[str, ...]:
        """Return the names of the parameters that learning changes, in order; by default all."""
        return tuple(params)

    @abstractmethod
    def distribution(self, params: Mapping[str, Tensor], observations: Tensor) -> Distribution:
        """Return the distributions of actions at some observations.

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
    """Distributions [N] that rollouts can draw from and record."""

    def sample(self) -> Tensor:
        """Draw actions, [N, A] float or [N] int64, with torch's own generator, which has been seeded for it."""
        ...

    def mode(self) -> Tensor:
        """Return the most likely actions, or a substitute for them, likewise."""
        ...

    def parameters(self) -> Mapping[str, Tensor]:
        """Return the arrays from which `Policy.recorded` rebuilds the distributions: name -> [N, ...]."""
        ...

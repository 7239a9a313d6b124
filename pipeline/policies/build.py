"""Policies built from settings: Gaussian, categorical, recurrent, or custom."""

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from metaloom.pipeline.nn.distributions import Categorical, DiagGaussian, Distribution
from metaloom.pipeline.nn.networks import Network, build_network, initialize_shapes
from metaloom.pipeline.nn.recurrent import Cell, build_cell
from metaloom.pipeline.nn.spec import Spaces
from metaloom.pipeline.policies.config import POLICIES, PolicyConfig
from metaloom.pipeline.policies.contract import OwnPolicy, Policy
from metaloom.pipeline.policies.inference import LOGITS_NETWORK, MEAN_NETWORK
from metaloom.pipeline.policies.own_checks import require_policy
from metaloom.pipeline.policies.remembering import policy_prefix
from metaloom.pipeline.schema import ConfigError
from metaloom.pipeline.types import Params

LOG_STD = "log_std"


class GaussianPolicy(Policy):
    """Gaussian policy for continuous actions; `extra_size` further inputs follow an observation. See Policy.

    Attributes:
        action_size: A.
        config: Options of the standard deviation.
    """

    def __init__(self, spaces: Spaces, config: PolicyConfig, extra_size: int = 0) -> None:
        self.action_size: int = spaces.action_size
        self.config: PolicyConfig = config
        spec = config.network_spec(spaces, spaces.action_size, extra_size=extra_size)
        self.network: Network = build_network(MEAN_NETWORK, spec)

    def initialize(self, rng: np.random.Generator) -> Params:
        """Draw float32 parameters: the mean network's in order, then log_std [A]."""
        params = self.network.initialize(rng)
        params[LOG_STD] = np.full(self.action_size, math.log(self.config.init_std), np.float32)
        return params

    def learned(self, params: Mapping[str, object]) -> tuple[str, ...]:
        """Return the names of the parameters that adaptation and meta-training change, in order."""
        return tuple(params) if self.config.learn_std else tuple(name for name in params if name != LOG_STD)

    def distribution(self, params: Mapping[str, Tensor], observations: Tensor) -> DiagGaussian:
        """Return the distribution: mean [..., N, A], log_std [..., 1, A] with the floor of min_std applied."""
        return self.head(self.network(params, observations), params[LOG_STD])

    def head(self, mean: Tensor, log_std: Tensor) -> DiagGaussian:
        """Return the distribution of actions given the network's output and log_std [..., A]."""
        # The reference clamps only on some paths (not for acting and per-task losses).
        return DiagGaussian(mean, log_std.clamp(min=math.log(self.config.min_std)).unsqueeze(-2))

    def recorded(self, behavior: Mapping[str, Tensor]) -> DiagGaussian:
        """Rebuild the distribution that acted from its recorded arrays."""
        return DiagGaussian(**behavior)


class CategoricalPolicy(Policy):
    """Categorical policy for discrete actions; `extra_size` further inputs follow an observation. See Policy."""

    def __init__(self, spaces: Spaces, config: PolicyConfig, extra_size: int = 0) -> None:
        spec = config.network_spec(spaces, spaces.num_actions, extra_size=extra_size)
        self.network: Network = build_network(LOGITS_NETWORK, spec)

    def distribution(self, params: Mapping[str, Tensor], observations: Tensor) -> Categorical:
        return self.head(self.network(params, observations))

    def head(self, logits: Tensor) -> Categorical:
        """Return the distribution of actions given the network's output."""
        return Categorical.of_logits(logits)

    def recorded(self, behavior: Mapping[str, Tensor]) -> Categorical:
        """Rebuild the distribution that acted from its recorded arrays."""
        return Categorical(**behavior)


def build_policy(config: PolicyConfig, spaces: Spaces) -> Policy:
    """Build a Gaussian policy for continuous actions, a categorical one for discrete actions, or a custom one.

    Raises:
        ConfigError: the policy or its network does not support the observations or actions, or a custom policy fails
            its checks.
    """
    if config.name is not None:
        policy = build_own_policy(config, spaces)
        require_policy(policy, config.name, spaces)
        return policy
    check_std(config, spaces)
    return CategoricalPolicy(spaces, config) if spaces.num_actions else GaussianPolicy(spaces, config)


def check_std(config: PolicyConfig, spaces: Spaces) -> None:
    """Reject settings of the standard deviation if actions are discrete.

    Raises:
        ConfigError: names them.
    """
    if spaces.num_actions and (options := config.std_options):
        raise ConfigError(
            f"policy: {options} sets a standard deviation, but the environment has {spaces.num_actions} discrete "
            "actions; remove it"
        )


def build_own_policy(config: PolicyConfig, spaces: Spaces) -> OwnPolicy:
    """Build a custom policy.

    Raises:
        ConfigError: the class cannot be found or constructed.
    """
    assert config.name is not None
    try:
        # a concrete subclass
        return POLICIES.find(config.name, OwnPolicy)(spaces, config)  # pyright: ignore[reportAbstractUsage]
    except ConfigError as problem:
        raise ConfigError(f"policy.name: {problem}") from problem
    except Exception as problem:
        raise ConfigError(
            f"policy.name: {config.name}(spaces, config) raised {type(problem).__name__}: {problem}; required a class "
            "whose constructor takes the sizes of the environment and the settings of the policy"
        ) from problem


class RecurrentPolicy:
    """A recurrent policy as functions of explicit parameters and memory."""

    def __init__(self, spaces: Spaces, config: PolicyConfig) -> None:
        self.cell: Cell = build_cell(config.cell_spec(spaces))
        self._config, self._spaces, self._head = config, spaces, f"{policy_prefix(spaces)}.output"

    def initialize(self, rng: np.random.Generator, output_scale: float) -> Params:
        """Draw float32 parameters by name, in order; `output_scale` multiplies the output layer."""
        A = self._spaces.num_actions or self._spaces.action_size
        shapes = {f"{self._head}.kernel": (self.cell.feature_size, A), f"{self._head}.bias": (A,)}
        params = self.cell.initialize(rng) | initialize_shapes(shapes, rng)
        params[f"{self._head}.kernel"] *= np.float32(output_scale)
        if not self._spaces.num_actions:
            params[LOG_STD] = np.full(A, math.log(self._config.init_std), np.float32)
        return params

    def learned(self, params: Mapping[str, object]) -> tuple[str, ...]:
        """Return the names of the parameters that learning changes, in order."""
        return tuple(name for name in params if self._config.learn_std or name != LOG_STD)

    def features(self, params: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
        """Return features [L, N, F] of N trials [L, N, in], starting from zero states."""
        return self.cell(params, inputs, inputs.new_zeros(inputs.shape[1], self.cell.state_size))[0]

    def distribution(self, params: Mapping[str, Tensor], features: Tensor) -> Distribution:
        """Return the distributions of actions [n] at features [n, F]."""
        outputs = torch.addmm(params[f"{self._head}.bias"], features, params[f"{self._head}.kernel"])
        if self._spaces.num_actions:
            return Categorical.of_logits(outputs)
        return DiagGaussian(outputs, params[LOG_STD].clamp(min=math.log(self._config.min_std)))

    def recorded(self, behavior: Mapping[str, Tensor]) -> Distribution:
        """Rebuild the distributions that acted from their recorded arrays, [...] each."""
        return Categorical(**behavior) if self._spaces.num_actions else DiagGaussian(**behavior)

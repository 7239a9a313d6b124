"""Policies built from their settings."""

from typing import Protocol

from metaloom.pipeline.envs.spaces import Spaces
from metaloom.pipeline.policies.categorical import CategoricalPolicy
from metaloom.pipeline.policies.config import POLICIES, PolicyConfig
from metaloom.pipeline.policies.contract import OwnPolicy, Policy
from metaloom.pipeline.policies.gaussian import GaussianPolicy
from metaloom.pipeline.schema import ConfigError


class Sizes(Protocol):
    """The sizes of an environment, as Spaces and Setup have them."""

    @property
    def observation_shape(self) -> tuple[int, ...]: ...
    @property
    def observation_scale(self) -> float: ...
    @property
    def action_size(self) -> int: ...
    @property
    def num_actions(self) -> int: ...


def build_policy(config: PolicyConfig, sizes: Sizes) -> Policy:
    """Build a Gaussian policy for continuous actions, a categorical one for discrete actions, or the user's own.

    Raises:
        ConfigError: the policy or its network is not for such observations or actions.
    """
    spaces = Spaces(sizes.observation_shape, sizes.observation_scale, sizes.action_size, sizes.num_actions)
    if config.name is not None:
        return build_own_policy(config, spaces)
    shape, scale = spaces.observation_shape, spaces.observation_scale
    if not spaces.num_actions:
        return GaussianPolicy(spaces.observation_size, spaces.action_size, config, shape, scale)
    if options := config.std_options:
        raise ConfigError(
            f"policy: {options} is about a standard deviation, but the environment has {spaces.num_actions} discrete "
            "actions; leave it out"
        )
    return CategoricalPolicy(spaces.observation_size, spaces.num_actions, config, shape, scale)


def build_own_policy(config: PolicyConfig, spaces: Spaces) -> OwnPolicy:
    """Build the user's own policy.

    Raises:
        ConfigError: it cannot be found or constructed.
    """
    assert config.name is not None
    try:
        # Its subclass, which is not abstract.
        return POLICIES.find(config.name, OwnPolicy)(spaces, config)  # pyright: ignore[reportAbstractUsage]
    except ConfigError as problem:
        raise ConfigError(f"policy.name: {problem}") from problem
    except Exception as problem:
        raise ConfigError(
            f"policy.name: {config.name}({spaces}, config) raised {type(problem).__name__}: {problem}"
        ) from problem

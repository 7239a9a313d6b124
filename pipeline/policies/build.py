"""Policies built from their settings."""

from metaloom.pipeline.nn.spec import Spaces
from metaloom.pipeline.policies.categorical import CategoricalPolicy
from metaloom.pipeline.policies.config import POLICIES, PolicyConfig
from metaloom.pipeline.policies.contract import OwnPolicy, Policy
from metaloom.pipeline.policies.gaussian import GaussianPolicy
from metaloom.pipeline.policies.own_checks import require_policy
from metaloom.pipeline.schema import ConfigError


def build_policy(config: PolicyConfig, spaces: Spaces) -> Policy:
    """Build a Gaussian policy for continuous actions, a categorical one for discrete actions, or the user's own.

    Raises:
        ConfigError: the policy or its network is not for such observations or actions; or the user's own is not what
            acting and learning take it for.
    """
    if config.name is not None:
        policy = build_own_policy(config, spaces)
        require_policy(policy, config.name, spaces)
        return policy
    check_std(config, spaces)
    return CategoricalPolicy(spaces, config) if spaces.num_actions else GaussianPolicy(spaces, config)


def check_std(config: PolicyConfig, spaces: Spaces) -> None:
    """Refuse settings of a standard deviation where actions are discrete.

    Raises:
        ConfigError: naming them.
    """
    if spaces.num_actions and (options := config.std_options):
        raise ConfigError(
            f"policy: {options} is about a standard deviation, but the environment has {spaces.num_actions} discrete "
            "actions; leave it out"
        )


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

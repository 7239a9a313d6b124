"""Construction of the environment, learner and measures that a configuration describes."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict

from metaloom.pipeline.algorithms.contract import AnyLearner, Setup
from metaloom.pipeline.config.run import RunConfig
from metaloom.pipeline.envs.contract import MetaEnv
from metaloom.pipeline.envs.registry import make_env
from metaloom.pipeline.envs.spaces import spaces_of
from metaloom.pipeline.estimation.diagnostics import Measures
from metaloom.pipeline.nn.spec import Spaces
from metaloom.pipeline.schema import ConfigError
from metaloom.pipeline.types import Array


def build_learner(config: RunConfig) -> tuple[Setup, AnyLearner, MetaEnv]:
    """Return a run's Setup, learner and environment, or raise ConfigError if the algorithm does not support them."""
    # Let the learner check the kind of actions first: discrete actions have no scale for the environment to apply.
    with closing(make_env(config.env.model_copy(update={"action_scale": None}))) as plain:
        setup = setup_of(config, plain)
    return setup, config.algorithm.build(setup), make_env(config.env)


def measures_of(config: RunConfig, env: MetaEnv) -> Measures:
    """Return the measures that a run computes for each rollout batch, or raise ConfigError if any is not available."""
    if config.env.diagnostics and not env.has_diagnostics:
        raise ConfigError(
            f"env.diagnostics is on, but {config.env.name} has none; remove it, or define MetaEnv.diagnostics in a "
            "custom environment"
        )
    return Measures.named(config.metrics, diagnostics=env.diagnostics if config.env.diagnostics else None)


def setup_of(config: RunConfig, env: MetaEnv) -> Setup:
    """Return the Setup that describes a run and its environment to a learner."""
    return setup_for(config, spaces_of(env), env.sparse_rewards)


def setup_for(config: RunConfig, spaces: Spaces, sparse_rewards: Callable[[Array], Array]) -> Setup:
    """Return a run's Setup, given its environment's spaces and sparse-reward function instead of the environment."""
    return Setup(
        **asdict(spaces),
        env_name=config.env.name,
        max_episode_steps=config.max_episode_steps,
        policy=config.policy,
        baseline=config.baseline,
        processing=config.processing,
        device=config.device,
        sparse_rewards=sparse_rewards,
    )

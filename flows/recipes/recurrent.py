"""A2C and PPO of policies that remember their episode, on any environment of one task."""

from metaloom.pipeline.algorithms.rl2.settings import RecurrentA2C, RecurrentPPO
from metaloom.pipeline.config.run import RunConfig
from metaloom.pipeline.envs.config import EnvConfig
from metaloom.pipeline.estimation.config import ProcessingConfig
from metaloom.pipeline.policies import PolicyConfig


def recurrent_ppo() -> RunConfig:
    """PPO with a memory on any environment; the half-cheetah without its velocities where none is named."""
    return _of_your_choice(RecurrentPPO(learning_rate=3e-4, num_epochs=5, trials_per_minibatch=8))


def recurrent_a2c() -> RunConfig:
    """A2C with a memory on any environment; the half-cheetah without its velocities where none is named."""
    return _of_your_choice(RecurrentA2C(learning_rate=7e-4, trials_per_minibatch=32))


def recurrent_ppo_cartpole() -> RunConfig:
    """Balance a pole without seeing velocities: PPO with a memory."""
    return _cartpole(
        RecurrentPPO(learning_rate=3e-3, num_epochs=5, trials_per_minibatch=8, entropy_coeff=0.01),
        iterations=40,
        episodes=32,
    )


def recurrent_a2c_cartpole() -> RunConfig:
    """Balance a pole without seeing velocities: A2C with a memory."""
    return _cartpole(
        RecurrentA2C(learning_rate=2e-3, trials_per_minibatch=8, entropy_coeff=0.01), iterations=300, episodes=8
    )


def _cartpole(algorithm: RecurrentA2C | RecurrentPPO, *, iterations: int, episodes: int) -> RunConfig:
    return RunConfig(
        env=EnvConfig(name="CartPole-v1", observed=(0, 2)),
        algorithm=algorithm,
        policy=PolicyConfig(network="gru", hidden_sizes=(32,)),
        processing=ProcessingConfig(discount=0.99, gae_lambda=0.95),
        iterations=iterations,
        episodes_per_task=episodes,
        max_episode_steps=200,
    )


def _of_your_choice(algorithm: RecurrentA2C | RecurrentPPO) -> RunConfig:
    return RunConfig(
        env=EnvConfig(name="HalfCheetah-v5", observed=tuple(range(8))),
        algorithm=algorithm,
        policy=PolicyConfig(network="gru", hidden_sizes=(64,)),
        iterations=500,
        episodes_per_task=32,
    )

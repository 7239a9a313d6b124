"""RL2: bandits at the sizes of its paper, point robots, and the half-cheetah with two episodes in a trial."""

from metaloom.pipeline.algorithms.rl2.settings import RL2, RL2TRPO
from metaloom.pipeline.config.evaluation import EvaluationConfig
from metaloom.pipeline.config.run import RunConfig
from metaloom.pipeline.envs.config import EnvConfig
from metaloom.pipeline.estimation.config import ProcessingConfig
from metaloom.pipeline.policies import PolicyConfig


def rl2() -> RunConfig:
    """RL2 on any environment with tasks; the half-cheetah in either direction where none is named."""
    return rl2_half_cheetah_dir()


def rl2_bandit() -> RunConfig:
    """Find the best of five arms within ten pulls: an episode is a whole trial."""
    return RunConfig(
        env=EnvConfig(name="bernoulli-bandit", options={"arms": 5}),
        algorithm=RL2(
            episodes_per_trial=1,
            learning_rate=3e-3,
            lr_schedule="exponential",
            lr_decay=0.988,
            num_epochs=5,
            trials_per_minibatch=250,
        ),
        policy=PolicyConfig(network="gru", hidden_sizes=(64,)),
        processing=ProcessingConfig(discount=1.0, gae_lambda=0.8),
        iterations=250,
        num_tasks=1000,
        episodes_per_task=1,
        max_episode_steps=10,
        evaluation=EvaluationConfig(num_tasks=5000, test_episodes=1, deterministic=True),
    )


def rl2_bandit_100() -> RunConfig:
    """Find the best of five arms within a hundred pulls, which takes more than greed."""
    return _small_world(
        EnvConfig(name="bernoulli-bandit", options={"arms": 5}),
        RL2(
            episodes_per_trial=1,
            learning_rate=2e-3,
            lr_schedule="exponential",
            lr_decay=0.993,
            num_epochs=5,
            trials_per_minibatch=50,
            entropy_coeff=0.02,
        ),
        network="gru",
        processing=ProcessingConfig(discount=1.0, gae_lambda=0.9),
        max_episode_steps=100,
    )


def rl2_tabular_mdp() -> RunConfig:
    """Earn in ten episodes of an unknown process of ten states what finding out about it leaves."""
    return _small_world(
        EnvConfig(name="tabular-mdp"),
        RL2(
            episodes_per_trial=10,
            learning_rate=2e-3,
            lr_schedule="linear",
            lr_horizon=400,
            num_epochs=5,
            trials_per_minibatch=50,
            entropy_coeff=0.05,
        ),
        # A gru learns far more slowly here; docs/algorithms/rl2.md has both.
        network="linear-attention",
        processing=ProcessingConfig(discount=0.99, gae_lambda=0.3),
        max_episode_steps=10,
    )


def rl2_ant_dir() -> RunConfig:
    """Walk forwards or backwards; the first of two episodes shows which."""
    return _robot("ant-dir")


def rl2_half_cheetah_dir() -> RunConfig:
    """Run forwards or backwards; the first of two episodes shows which."""
    return _robot("half-cheetah-dir", learning_rate=7e-4, iterations=200)


def rl2_half_cheetah_vel() -> RunConfig:
    """Run at a target speed, which the first of two episodes shows."""
    return _robot("half-cheetah-vel")


def rl2_point_corner() -> RunConfig:
    """Go to one of the corners that the observation does not tell apart."""
    return _robot("point-corner", learning_rate=1e-3, iterations=200, hidden_size=64, init_std=0.5)


def rl2_navigation_2d() -> RunConfig:
    """Find a near goal in the plane that the observation does not show; an episode ends there."""
    return _robot("navigation-2d", learning_rate=1e-3, iterations=200, hidden_size=64, init_std=0.5)


def rl2_trpo() -> RunConfig:
    """RL2 as in its paper on any environment with tasks; the half-cheetah in either direction where none is named."""
    return _by_trpo(rl2_half_cheetah_dir())


def rl2_trpo_bandit() -> RunConfig:
    """Find the best of five arms within ten pulls, by the updates of the paper."""
    return _by_trpo(rl2_bandit())


def _by_trpo(config: RunConfig) -> RunConfig:
    algorithm = RL2TRPO(episodes_per_trial=config.algorithm.trial or 1)
    return config.model_copy(update={"algorithm": algorithm})


def _small_world(
    env: EnvConfig, algorithm: RL2, *, network: str, processing: ProcessingConfig, max_episode_steps: int
) -> RunConfig:
    """Trials of a hundred steps with a few discrete actions.

    Without a price of certainty (entropy_coeff), actions are certain before what they tell has been learned.
    """
    return RunConfig(
        env=env,
        algorithm=algorithm,
        policy=PolicyConfig(network=network, hidden_sizes=(64,)),
        processing=processing,
        iterations=400,
        num_tasks=500,
        episodes_per_task=algorithm.episodes_per_trial,
        max_episode_steps=max_episode_steps,
        evaluation=EvaluationConfig(every=50, num_tasks=1000, test_episodes=1, deterministic=True),
    )


def _robot(
    name: str, *, learning_rate: float = 3e-4, iterations: int = 1000, hidden_size: int = 128, init_std: float = 1.0
) -> RunConfig:
    return RunConfig(
        env=EnvConfig(name=name, action_scale=1.0),
        algorithm=RL2(learning_rate=learning_rate, num_epochs=5, trials_per_minibatch=10),
        policy=PolicyConfig(network="gru", hidden_sizes=(hidden_size,), init_std=init_std),
        processing=ProcessingConfig(discount=0.99, gae_lambda=0.95),
        iterations=iterations,
        num_tasks=40,
        episodes_per_task=4,
        max_episode_steps=100,
        evaluation=EvaluationConfig(every=20, test_episodes=2),
    )

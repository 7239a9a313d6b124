"""DQL and SAC on any gymnasium environment, and at the sizes of SimuRLacra's (Pyrado's) training scripts.

The plain names are for an environment of your own choice, `--set env=Acrobot-v1`. The others repeat the settings of one
script each; the scripts' simulators are not part of this project, so a gymnasium environment stands in.
"""

from metaloom.pipeline.algorithms.off_policy.dql import DQL
from metaloom.pipeline.algorithms.off_policy.sac import SAC
from metaloom.pipeline.config.evaluation import EvaluationConfig
from metaloom.pipeline.config.run import RunConfig
from metaloom.pipeline.envs.config import EnvConfig
from metaloom.pipeline.estimation.config import ProcessingConfig
from metaloom.pipeline.policies import PolicyConfig


def dql() -> RunConfig:
    """DQL on any environment with discrete actions; solves CartPole-v1."""
    algorithm = DQL(
        learning_rate=5e-4,
        batch_size=64,
        memory_size=50_000,
        num_init_memory_steps=1000,
        target_update_intvl=100,
        eps_init=1.0,
        eps_schedule_gamma=0.97,
    )
    return RunConfig(
        env=EnvConfig(name="CartPole-v1"),
        algorithm=algorithm,
        policy=PolicyConfig(hidden_sizes=(64, 64)),
        iterations=400,
        evaluation=EvaluationConfig(every=20, test_episodes=20, deterministic=True),
    )


def sac() -> RunConfig:
    """SAC on any environment whose actions are numbers, at the sizes that are customary for MuJoCo robots."""
    return RunConfig(
        env=EnvConfig(name="HalfCheetah-v5", action_scale=1.0),
        algorithm=SAC(num_init_memory_steps=10_000),
        iterations=1000,
        evaluation=EvaluationConfig(every=10, test_episodes=5, deterministic=True),
    )


def sac_pendulum() -> RunConfig:
    """SAC on gymnasium's pendulum: minutes."""
    return RunConfig(
        env=EnvConfig(name="Pendulum-v1", action_scale=1.0),
        algorithm=SAC(learning_rate=1e-3, num_init_memory_steps=1000, critic_hidden_sizes=(64, 64)),
        policy=PolicyConfig(hidden_sizes=(64, 64)),
        iterations=60,
        evaluation=EvaluationConfig(every=10, test_episodes=10, deterministic=True),
    )


def dql_bob() -> RunConfig:
    """`bob-d_dql` (ball on a beam) of SimuRLacra, on CartPole-v1."""
    algorithm = DQL(
        learning_rate=7.461e-4,
        batch_size=256,
        memory_size=100 * 500,
        num_updates_per_step=10,
        eps_init=0.1286,
        eps_schedule_gamma=0.9955,
    )
    return RunConfig(
        env=EnvConfig(name="CartPole-v1"),
        algorithm=algorithm,
        processing=ProcessingConfig(discount=0.995),
        iterations=5000,
    )


def sac_omo() -> RunConfig:
    """`omo_sac` (one-mass oscillator) of SimuRLacra, on an inverted pendulum of 200 steps."""
    algorithm = SAC(memory_size=100 * 200, batch_size=256, target_update_intvl=5, critic_hidden_sizes=(32, 32))
    return RunConfig(
        env=EnvConfig(name="InvertedPendulum-v5", action_scale=1.0),
        algorithm=algorithm,
        policy=PolicyConfig(hidden_sizes=(32, 32)),
        processing=ProcessingConfig(discount=0.995),
        iterations=1000,
        max_episode_steps=200,
    )

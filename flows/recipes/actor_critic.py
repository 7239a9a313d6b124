"""A2C, PPO, PPO2 and SVPG on any gymnasium environment, and at the sizes of SimuRLacra's (Pyrado's) training scripts.

The plain names are for an environment of your own choice, `--set env=CartPole-v1`; sizes and step sizes are those that
are customary for MuJoCo robots. The others repeat the settings of one script each. Their simulators are not part of
this project, so a gymnasium environment of the same kind stands in.
"""

from metaloom.pipeline.algorithms.actor_critic.a2c import A2C
from metaloom.pipeline.algorithms.actor_critic.ppo import PPO
from metaloom.pipeline.algorithms.actor_critic.ppo2 import PPO2
from metaloom.pipeline.algorithms.actor_critic.svpg import SVPG
from metaloom.pipeline.config.run import RunConfig
from metaloom.pipeline.envs.config import EnvConfig
from metaloom.pipeline.estimation.config import ProcessingConfig
from metaloom.pipeline.policies import PolicyConfig

HALF_CHEETAH = "HalfCheetah-v5"
MOST_EPISODES = 128
CUSTOMARY_PPO = PPO(
    learning_rate=3e-4,
    num_epochs=10,
    clip_eps=0.2,
    max_grad_norm=0.5,
    critic_learning_rate=3e-4,
    critic_max_grad_norm=0.5,
)
"""The step sizes and epochs that Stable-Baselines3 has for MuJoCo robots."""


def a2c() -> RunConfig:
    """A2C on any environment; a few thousand steps per pass."""
    return _of_your_choice(A2C(learning_rate=1e-3, batch_size=256, max_grad_norm=0.5))


def ppo() -> RunConfig:
    """PPO on any environment, with the step sizes and epochs that Stable-Baselines3 has for MuJoCo robots."""
    return _of_your_choice(CUSTOMARY_PPO)


def ppo2() -> RunConfig:
    """PPO2 on any environment, with the step sizes and epochs that OpenAI Baselines has for MuJoCo robots."""
    algorithm = PPO2(
        learning_rate=3e-4, num_epochs=10, batch_size=64, clip_eps=0.2, max_grad_norm=0.5, entropy_coeff=0.0
    )
    return _of_your_choice(algorithm)


def svpg() -> RunConfig:
    """SVPG with four A2C particles on any environment."""
    return _of_your_choice(SVPG(particle=A2C(learning_rate=1e-3, batch_size=256, max_grad_norm=0.5)))


def _of_your_choice(algorithm: A2C | PPO | PPO2 | SVPG) -> RunConfig:
    return RunConfig(
        env=EnvConfig(name=HALF_CHEETAH),
        algorithm=algorithm,
        iterations=500,
        episodes_per_task=MOST_EPISODES,
        min_steps=2000,
    )


def a2c_bob() -> RunConfig:
    """`bob_a2c` (ball on a beam) of SimuRLacra, on an inverted pendulum."""
    algorithm = A2C(
        learning_rate=2e-3,
        lr_schedule="exponential",
        lr_decay=0.99,
        batch_size=100,
        entropy_coeff=4e-5,
        value_coeff=0.7,
    )
    return RunConfig(
        env=EnvConfig(name="InvertedPendulum-v5"),
        algorithm=algorithm,
        policy=PolicyConfig(init_std=0.8),
        processing=ProcessingConfig(discount=0.99, gae_lambda=0.95),
        iterations=500,
        episodes_per_task=2 * MOST_EPISODES,
        max_episode_steps=500,
        min_steps=10_000,
    )


def ppo2_pend() -> RunConfig:
    """`pend_ppo2` (pendulum swing-up) of SimuRLacra, on gymnasium's pendulum."""
    algorithm = PPO2(
        learning_rate=2e-3,
        lr_schedule="exponential",
        lr_decay=0.995**5,  # the script has 0.995 for every pass over the data
        num_epochs=5,
        batch_size=512,
        max_grad_norm=5.0,
        entropy_coeff=5e-5,
        value_coeff=1.2,
    )
    return RunConfig(
        env=EnvConfig(name="Pendulum-v1"),
        algorithm=algorithm,
        policy=PolicyConfig(init_std=0.8),
        processing=ProcessingConfig(discount=0.985, gae_lambda=0.975),
        iterations=200,
        episodes_per_task=20,
        max_episode_steps=800,
        min_steps=20 * 800,
    )


def ppo_qq_su() -> RunConfig:
    """`qq-su_ppo` (Furuta pendulum swing-up) of SimuRLacra, on gymnasium's pendulum."""
    algorithm = PPO(
        learning_rate=3.446e-4,
        num_epochs=7,
        batch_size=250,
        max_grad_norm=1.0,
        clip_eps=0.0744,
        critic_learning_rate=5.792e-4,
        critic_num_epochs=2,
        critic_batch_size=250,
    )
    return RunConfig(
        env=EnvConfig(name="Pendulum-v1"),
        algorithm=algorithm,
        policy=PolicyConfig(init_std=0.9074),
        processing=ProcessingConfig(discount=0.9885, gae_lambda=0.9648),
        iterations=300,
        episodes_per_task=23,
        max_episode_steps=600,
        min_steps=23 * 600,
    )


def svpg_omo() -> RunConfig:
    """`omo_svpg` (one-mass oscillator) of SimuRLacra, on an inverted pendulum; tanh instead of relu layers."""
    algorithm = SVPG(
        particle=A2C(learning_rate=1e-3, critic_hidden_sizes=(32,)), num_particles=3, temperature=1.0, horizon=50
    )
    return RunConfig(
        env=EnvConfig(name="InvertedPendulum-v5"),
        algorithm=algorithm,
        policy=PolicyConfig(hidden_sizes=(64,)),
        iterations=200,
        episodes_per_task=MOST_EPISODES,
        max_episode_steps=500,
        min_steps=2 * 500,
    )

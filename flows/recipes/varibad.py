"""VariBAD: the grid of its paper, and the half-cheetah with two episodes in a trial."""

from metaloom.pipeline.algorithms.varibad.settings import VariBAD
from metaloom.pipeline.config.evaluation import EvaluationConfig
from metaloom.pipeline.config.run import RunConfig
from metaloom.pipeline.envs.config import EnvConfig
from metaloom.pipeline.estimation.config import ProcessingConfig
from metaloom.pipeline.policies import PolicyConfig


def varibad() -> RunConfig:
    """VariBAD on any environment with tasks; the half-cheetah in either direction where none is named."""
    return varibad_half_cheetah_dir()


def varibad_half_cheetah_dir() -> RunConfig:
    """Run forwards or backwards; the first of two episodes shows which."""
    return _robot("half-cheetah-dir")


def varibad_half_cheetah_vel() -> RunConfig:
    """Run at a target speed, which the first of two episodes shows."""
    return _robot("half-cheetah-vel")


def varibad_hidden_goal_grid() -> RunConfig:
    """Search a grid for its goal, and go there in the other three episodes of a trial."""
    return RunConfig(
        env=EnvConfig(name="hidden-goal-grid"),
        algorithm=VariBAD(
            episodes_per_trial=4,
            reward_decoder="heads",
            reward_likelihood="bernoulli",
            kl_weight=0.05,
            num_epochs=4,
            trials_per_minibatch=40,
            learning_rate=2e-3,
            lr_schedule="linear",
            lr_horizon=450,
            entropy_coeff=0.03,
            model_updates=20,
        ),
        policy=PolicyConfig(hidden_sizes=(64, 64)),
        processing=ProcessingConfig(discount=0.95, gae_lambda=0.95),
        iterations=400,
        num_tasks=40,
        episodes_per_task=16,
        max_episode_steps=15,
        evaluation=EvaluationConfig(every=20, num_tasks=210, test_episodes=1, deterministic=True),
    )


def _robot(name: str) -> RunConfig:
    return RunConfig(
        env=EnvConfig(name=name, action_scale=1.0),
        algorithm=VariBAD(
            learning_rate=3e-4,
            num_epochs=5,
            trials_per_minibatch=10,
            encoder_size=128,
            decode_states=True,
            elbo_steps=25,
            decoded_steps=50,
        ),
        policy=PolicyConfig(hidden_sizes=(128, 128), init_std=1.0),
        processing=ProcessingConfig(discount=0.99, gae_lambda=0.95),
        iterations=1000,
        num_tasks=40,
        episodes_per_task=4,
        max_episode_steps=100,
        evaluation=EvaluationConfig(every=20, test_episodes=2),
    )

"""PEARL at the sizes of its authors' experiments.

Rakelly et al. 2019, arXiv:1903.08254. Where the original draws tasks with replacement, ours draws distinct ones, so
with two tasks a gradient step takes both instead of four draws.
"""

from metaloom.pipeline.algorithms.pearl.settings import PEARL
from metaloom.pipeline.config.evaluation import EvaluationConfig
from metaloom.pipeline.config.run import RunConfig
from metaloom.pipeline.envs.config import EnvConfig
from metaloom.pipeline.estimation.config import ProcessingConfig


def pearl_ant_dir() -> RunConfig:
    """Walk forwards or backwards on four legs."""
    algorithm = PEARL(
        meta_batch_size=2,
        num_updates=4000,
        num_extra_rl_steps_posterior=600,
        embedding_batch_size=256,
        num_exp_traj_eval=2,
    )
    env = EnvConfig(name="pearl-ant-dir", options={"forward_backward": True}, action_scale=1.0)
    return _run(env, algorithm, num_tasks=2, test_episodes=4)


def pearl_ant_goal() -> RunConfig:
    """Go to a place in the plane on four legs."""
    algorithm = PEARL(
        meta_batch_size=10,
        num_updates=4000,
        num_extra_rl_steps_posterior=400,
        embedding_batch_size=256,
        kl_weight=1.0,
    )
    return _run("pearl-ant-goal", algorithm)


def pearl_cheetah_dir() -> RunConfig:
    """Run forwards or backwards."""
    algorithm = PEARL(
        meta_batch_size=2,
        num_steps_prior=1000,
        num_extra_rl_steps_posterior=1000,
        embedding_batch_size=256,
        num_exp_traj_eval=2,
    )
    return _run("pearl-cheetah-dir", algorithm, num_tasks=2, test_episodes=4)


def pearl_cheetah_vel() -> RunConfig:
    """Run at one of 100 speeds: 200,000 steps to fill the memory, then 5,000 per iteration."""
    algorithm = PEARL(num_extra_rl_steps_posterior=600, embedding_batch_size=100, num_exp_traj_eval=2)
    return _run("pearl-cheetah-vel", algorithm, test_episodes=1)


def pearl_hopper_rand_params() -> RunConfig:
    """Hop on one leg of random mass, damping and friction."""
    return _run("pearl-hopper-rand-params", _dynamics())


def pearl_humanoid_dir() -> RunConfig:
    """Walk in one of 100 directions on two legs."""
    algorithm = PEARL(num_updates=4000, num_extra_rl_steps_posterior=400, embedding_batch_size=256)
    return _run("pearl-humanoid-dir", algorithm)


def pearl_point_robot() -> RunConfig:
    """Go to a goal in the square that the observation does not show."""
    algorithm = PEARL(
        num_updates=1000,
        num_initial_steps=200,
        num_steps_prior=200,
        num_extra_rl_steps_posterior=200,
        embedding_batch_size=64,
        reward_scale=100.0,
    )
    return _run("pearl-point-robot", algorithm, max_episode_steps=20)


def pearl_sparse_point_robot() -> RunConfig:
    """Find a goal on the half circle: context and evaluation see a reward near it only."""
    algorithm = PEARL(
        num_steps_prior=100,
        num_steps_posterior=900,
        num_extra_rl_steps_posterior=0,
        embedding_batch_size=1024,
        reward_scale=100.0,
        kl_weight=1.0,
        sparse_rewards=True,
        num_exp_traj_eval=5,
    )
    return _run(
        "pearl-sparse-point-robot",
        algorithm,
        num_tasks=10,
        discount=0.9,
        max_episode_steps=20,
        adaptation_steps=19,
    )


def pearl_walker2d_rand_params() -> RunConfig:
    """Walk on two legs of random mass, damping and friction."""
    return _run("pearl-walker2d-rand-params", _dynamics())


def _dynamics() -> PEARL:
    """Settings for bodies that are told apart by how the next observation follows."""
    return PEARL(
        meta_batch_size=10,
        num_updates=4000,
        num_extra_rl_steps_posterior=400,
        embedding_batch_size=100,
        use_next_obs_in_context=True,
    )


def _run(
    env: str | EnvConfig,
    algorithm: PEARL,
    *,
    num_tasks: int = 5,
    max_episode_steps: int = 200,
    discount: float = 0.99,
    adaptation_steps: int = 2,
    test_episodes: int = 2,
) -> RunConfig:
    return RunConfig(
        env=EnvConfig(name=env, action_scale=1.0) if isinstance(env, str) else env,
        algorithm=algorithm,
        processing=ProcessingConfig(discount=discount),
        iterations=500,
        num_tasks=num_tasks,
        max_episode_steps=max_episode_steps,
        evaluation=EvaluationConfig(
            every=10, adaptation_steps=adaptation_steps, test_episodes=test_episodes, deterministic=True
        ),
    )

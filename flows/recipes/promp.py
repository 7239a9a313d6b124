"""ProMP at the sizes of its authors' experiments.

Rothfuss et al. 2019, arXiv:1810.06784: 40 tasks, 20 episodes, two hidden layers of 64, one inner step of 0.1, five
Adam steps of 1e-3, clipping at 0.3, a fixed inner KL penalty of 5e-4. Episodes have 100 steps on half-cheetah and
point robots, which are the authors' run scripts, and 200 on the other robots, as in the experiments of their paper.
"""

from typing import Any

from metaloom.pipeline.algorithms.maml.settings import ProMP
from metaloom.pipeline.config.run import RunConfig
from metaloom.pipeline.envs.config import EnvConfig
from metaloom.pipeline.policies import PolicyConfig

LONG = 200
"""Steps of an episode on the robots that can fall, and on those that are slow to start."""


def first_steps() -> RunConfig:
    """Find out which of four corners to go to: adaptation to be seen within a minute; sizes of ours."""
    # Trained for one inner step, the second undoes the first: -141, -60, -150. So this trains for two.
    return RunConfig(
        env=EnvConfig(name="point-corner", options={"reward": "dense"}),
        algorithm=ProMP(inner_lr=0.25, inner_steps=2, outer_lr=3e-3),
        iterations=20,
        num_tasks=20,
        task_sampling="balanced",
        episodes_per_task=10,
        max_episode_steps=50,
    )


def promp() -> RunConfig:
    """ProMP on any environment: 40 tasks, 20 episodes; as on the half-cheetah where none is named."""
    return promp_half_cheetah_dir()


def promp_ant_dir() -> RunConfig:
    """Run forwards or backwards on four legs, 200 steps."""
    return _run("ant-dir", max_episode_steps=LONG)


def promp_ant_dir_2d() -> RunConfig:
    """Run in any direction of the plane on four legs, 200 steps."""
    return _run("ant-dir-2d", max_episode_steps=LONG)


def promp_ant_goal() -> RunConfig:
    """Go to a place in the plane on four legs, 200 steps and two inner steps: 480,000 steps per iteration."""
    return _run("ant-goal", ProMP(inner_steps=2), max_episode_steps=LONG)


def promp_bandit() -> RunConfig:
    """Find the best of five arms by one gradient step on twenty rounds of ten pulls; sizes of ours."""
    return _run("bernoulli-bandit", _for_small_worlds(), max_episode_steps=10)


def promp_half_cheetah_dir() -> RunConfig:
    """Run forwards or backwards; `pro-mp_run_mujoco` of the authors' code."""
    return _run("half-cheetah-dir")


def promp_half_cheetah_vel() -> RunConfig:
    """Run at a target speed between 0 and 3 m/s."""
    return _run("half-cheetah-vel")


def promp_hidden_goal_grid() -> RunConfig:
    """Find one of 21 cells of a grid, 15 steps as in VariBAD's experiments; sizes of ours."""
    return _run("hidden-goal-grid", _for_small_worlds(), max_episode_steps=15)


def promp_hopper_rand_params() -> RunConfig:
    """Hop with an unknown body, 200 steps; inner step 0.05, three Adam steps, adaptive KL penalty from 1e-3."""
    return _run("hopper-rand-params", _for_unknown_bodies(), max_episode_steps=LONG)


def promp_humanoid_dir() -> RunConfig:
    """Walk forwards or backwards on two legs, 200 steps, hidden layers of 128."""
    return _run("humanoid-dir", max_episode_steps=LONG, policy=PolicyConfig(hidden_sizes=(128, 128)))


def promp_humanoid_dir_2d() -> RunConfig:
    """Walk in any direction of the plane on two legs, 200 steps, hidden layers of 128."""
    return _run("humanoid-dir-2d", max_episode_steps=LONG, policy=PolicyConfig(hidden_sizes=(128, 128)))


def promp_point_corner() -> RunConfig:
    """Find one of four corners, sparse reward; `pro-mp_run_point_mass` of the authors' code."""
    return _run("point-corner")


def promp_point_corner_tuned() -> RunConfig:
    """Go to one of four corners, dense reward, a quarter of the steps; settings of ours.

    With the authors' settings the inner step hardly moves the policy, and learned deviations shrink; see
    docs/environments/point.md.
    """
    return _run(
        "point-corner",
        ProMP(inner_lr=5.0),
        env_options={"reward": "dense"},
        policy=PolicyConfig(min_std=1.0),
        iterations=200,
        num_tasks=20,
        episodes_per_task=10,
    )


def promp_swimmer_vel() -> RunConfig:
    """Swim at a target speed between 0.1 and 0.2 m/s, 200 steps; the authors publish no run, so their other sizes."""
    return _run("swimmer-vel", max_episode_steps=LONG)


def promp_tabular_mdp() -> RunConfig:
    """Learn a random process of 10 states and 5 actions, 10 steps as in RL2's experiments; sizes of ours."""
    return _run("tabular-mdp", _for_small_worlds(), max_episode_steps=10)


def promp_walker2d_dir() -> RunConfig:
    """Walk forwards or backwards in a plane, 200 steps."""
    return _run("walker2d-dir", max_episode_steps=LONG)


def promp_walker2d_rand_params() -> RunConfig:
    """Walk with an unknown body, 200 steps; inner step 0.05, three Adam steps, adaptive KL penalty from 1e-3."""
    return _run("walker2d-rand-params", _for_unknown_bodies(), max_episode_steps=LONG)


def promp_walker2d_vel() -> RunConfig:
    """Walk at a target speed between 0 and 10 m/s, 200 steps."""
    return _run("walker2d-vel", max_episode_steps=LONG)


def _for_small_worlds() -> ProMP:
    # Unit vectors make for small gradients.
    return ProMP(inner_lr=1.0, outer_lr=3e-3)


def _for_unknown_bodies() -> ProMP:
    return ProMP(
        inner_lr=0.05,
        num_epochs=3,
        init_inner_kl_penalty=1e-3,
        adaptive_inner_kl_penalty=True,
        target_inner_kl=0.01,
    )


def _run(
    env: str, algorithm: ProMP | None = None, env_options: dict[str, Any] | None = None, **sizes: Any
) -> RunConfig:
    return RunConfig(env=EnvConfig(name=env, options=env_options or {}), algorithm=algorithm or ProMP(), **sizes)

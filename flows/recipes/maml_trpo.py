"""MAML-TRPO at the sizes of the ProMP authors' run script.

Rothfuss et al. 2019, arXiv:1810.06784: 40 tasks, 20 episodes of 100 steps, two hidden layers of 64, one log-likelihood
inner step of 0.1, a KL bound of 0.01, 10 steps of conjugate gradient.
"""

from metaloom.pipeline.algorithms.maml.settings import MAMLTRPO
from metaloom.pipeline.config.run import RunConfig
from metaloom.pipeline.envs.config import EnvConfig


def maml_trpo_half_cheetah_dir() -> RunConfig:
    """Run forwards or backwards; `maml_run_mujoco` of the ProMP authors' code."""
    return _run("half-cheetah-dir")


def maml_trpo_navigation_2d() -> RunConfig:
    """Find a near goal in the plane: the 2-D navigation of MAML's paper, arXiv:1703.03400, with 20 tasks."""
    return _run("navigation-2d", num_tasks=20)


def maml_trpo_point_corner() -> RunConfig:
    """Find one of four corners, sparse reward; `maml_run_mujoco` of the ProMP authors' code on the point robot."""
    return _run("point-corner")


def _run(env: str, num_tasks: int = 40) -> RunConfig:
    return RunConfig(env=EnvConfig(name=env), algorithm=MAMLTRPO(), num_tasks=num_tasks)

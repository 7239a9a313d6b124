"""ProMP at the sizes of its authors' run scripts.

Rothfuss et al. 2019, arXiv:1810.06784: 40 tasks, 20 episodes of 100 steps, two hidden layers of 64, one inner step of
0.1, five Adam steps of 1e-3, clipping at 0.3, a fixed inner KL penalty of 5e-4.
"""

from pipeline.algorithms import ProMP
from pipeline.config import RunConfig
from pipeline.envs.config import EnvConfig


def half_cheetah_dir() -> RunConfig:
    """Run forwards or backwards; `pro-mp_run_mujoco` of the authors' code."""
    return _run("half-cheetah-dir")


def half_cheetah_vel() -> RunConfig:
    """Run at a target speed between 0 and 3 m/s."""
    return _run("half-cheetah-vel")


def point_corner() -> RunConfig:
    """Find one of four corners, sparse reward; `pro-mp_run_point_mass` of the authors' code."""
    return _run("point-corner")


def _run(env: str) -> RunConfig:
    return RunConfig(env=EnvConfig(name=env), algorithm=ProMP())

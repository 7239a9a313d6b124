"""E-MAML at the sizes of the ProMP authors' run script.

Rothfuss et al. 2019, arXiv:1810.06784: as MAML-TRPO there (40 tasks, 20 episodes of 100 steps, two hidden layers of 64,
one log-likelihood inner step of 0.1, a KL bound of 0.01), with credit for exploration, on the scale of means.
"""

from metaloom.pipeline.algorithms.maml.settings import EMAML
from metaloom.pipeline.config.run import RunConfig
from metaloom.pipeline.envs.config import EnvConfig


def e_maml_half_cheetah_dir() -> RunConfig:
    """Run forwards or backwards; `e-maml_run_mujoco` of the ProMP authors' code."""
    return _run("half-cheetah-dir")


def e_maml_point_corner() -> RunConfig:
    """Find one of four corners, sparse reward; `e-maml_run_mujoco` of the ProMP authors' code on the point robot."""
    return _run("point-corner")


def _run(env: str) -> RunConfig:
    return RunConfig(env=EnvConfig(name=env), algorithm=EMAML())

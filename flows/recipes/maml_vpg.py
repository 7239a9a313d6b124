"""MAML-VPG at the sizes of the ProMP paper's experiments.

Rothfuss et al. 2019, arXiv:1810.06784: 40 tasks, 20 episodes of 100 steps, two hidden layers of 64, one log-likelihood
inner step of 0.1, one Adam step of 1e-3 (`vpg_run_all` in branch full_code of the authors' code).
"""

from metaloom.pipeline.algorithms.maml.settings import MAMLVPG
from metaloom.pipeline.config.run import RunConfig
from metaloom.pipeline.envs.config import EnvConfig


def maml_vpg_half_cheetah_dir() -> RunConfig:
    """Run forwards or backwards; `vpg_run_all` of the ProMP authors' code."""
    return _run("half-cheetah-dir")


def maml_vpg_point_corner() -> RunConfig:
    """Find one of four corners, sparse reward; `vpg_run_all` of the ProMP authors' code on the point robot."""
    return _run("point-corner")


def _run(env: str) -> RunConfig:
    return RunConfig(env=EnvConfig(name=env), algorithm=MAMLVPG())

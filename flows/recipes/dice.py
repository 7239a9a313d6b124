"""DICE-MAML at the sizes of the `dice_maml` configuration of the ProMP authors' code (branch full_code).

40 tasks, 20 episodes of 100 steps, 300 iterations, two hidden layers of 64, one inner step of 0.1, one Adam step of
1e-3. The reward baseline sees time alone, as in their scripts for DiCE.
"""

from metaloom.pipeline.algorithms.maml.settings import DiceMAML
from metaloom.pipeline.baselines import BaselineConfig
from metaloom.pipeline.config.run import RunConfig
from metaloom.pipeline.envs.config import EnvConfig


def dice_maml_half_cheetah_dir() -> RunConfig:
    """Run forwards or backwards; `dice_run` of the authors' code."""
    return _run("half-cheetah-dir")


def dice_maml_point_corner() -> RunConfig:
    """Find one of four corners, sparse reward; `dice_run` of the authors' code on the point robot."""
    return _run("point-corner")


def _run(env: str) -> RunConfig:
    return RunConfig(
        env=EnvConfig(name=env), algorithm=DiceMAML(), baseline=BaselineConfig(name="linear_time"), iterations=300
    )

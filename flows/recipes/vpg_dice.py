"""VPG-DICE at the sizes of the `vpg_dice_maml` configuration of the ProMP authors' code (branch full_code).

40 tasks, 80 episodes of 100 steps, 300 iterations, two hidden layers of 64, one inner step of 0.1, one Adam step of
1e-3. The reward baseline sees time alone; the return baseline, for the advantages, observations as well.
"""

from metaloom.pipeline.algorithms.maml.settings import VPGDice
from metaloom.pipeline.baselines import BaselineConfig
from metaloom.pipeline.config.run import RunConfig
from metaloom.pipeline.envs.config import EnvConfig
from metaloom.pipeline.estimation.config import ProcessingConfig


def vpg_dice_half_cheetah_dir() -> RunConfig:
    """Run forwards or backwards; `vpg_dice_run` of the authors' code."""
    return _run("half-cheetah-dir")


def vpg_dice_point_corner() -> RunConfig:
    """Find one of four corners, sparse reward; `vpg_dice_run` of the authors' code on the point robot."""
    return _run("point-corner")


def _run(env: str) -> RunConfig:
    return RunConfig(
        env=EnvConfig(name=env),
        algorithm=VPGDice(),
        baseline=BaselineConfig(name="linear_time"),
        processing=ProcessingConfig(return_baseline=BaselineConfig(name="linear_feature")),
        iterations=300,
        episodes_per_task=80,
    )

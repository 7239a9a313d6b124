"""The algorithms of the MAML family at the sizes of their authors' experiments; ProMP has a module of its own.

The plain names are for an environment of your own choice, `--set env=ant-dir`.
"""

from typing import Any

from metaloom.pipeline.algorithms.maml.settings import (
    EMAML,
    MAMLPPO,
    MAMLTRPO,
    MAMLVPG,
    DiceMAML,
    GradientBased,
    VPGDice,
)
from metaloom.pipeline.baselines import BaselineConfig
from metaloom.pipeline.config.run import RunConfig
from metaloom.pipeline.envs.config import EnvConfig
from metaloom.pipeline.estimation.config import ProcessingConfig


def maml_trpo() -> RunConfig:
    """MAML-TRPO on any environment; as on the half-cheetah where none is named."""
    return maml_trpo_half_cheetah_dir()


def maml_trpo_half_cheetah_dir() -> RunConfig:
    """Run forwards or backwards; `maml_run_mujoco` of the ProMP authors' code."""
    return _run("half-cheetah-dir", MAMLTRPO())


def maml_trpo_navigation_2d() -> RunConfig:
    """Find a near goal in the plane: the 2-D navigation of MAML's paper, arXiv:1703.03400, with 20 tasks."""
    return _run("navigation-2d", MAMLTRPO(), num_tasks=20)


def maml_trpo_point_corner() -> RunConfig:
    """Find one of four corners, sparse reward; `maml_run_mujoco` of the ProMP authors' code on the point robot."""
    return _run("point-corner", MAMLTRPO())


def maml_vpg() -> RunConfig:
    """MAML-VPG on any environment; as on the half-cheetah where none is named."""
    return maml_vpg_half_cheetah_dir()


def maml_vpg_half_cheetah_dir() -> RunConfig:
    """Run forwards or backwards; `vpg_run_all` of the ProMP authors' code."""
    return _run("half-cheetah-dir", MAMLVPG())


def maml_vpg_point_corner() -> RunConfig:
    """Find one of four corners, sparse reward; `vpg_run_all` of the ProMP authors' code on the point robot."""
    return _run("point-corner", MAMLVPG())


def e_maml() -> RunConfig:
    """E-MAML on any environment; as on the half-cheetah where none is named."""
    return e_maml_half_cheetah_dir()


def e_maml_half_cheetah_dir() -> RunConfig:
    """Run forwards or backwards; `e-maml_run_mujoco` of the ProMP authors' code."""
    return _run("half-cheetah-dir", EMAML())


def e_maml_point_corner() -> RunConfig:
    """Find one of four corners, sparse reward; `e-maml_run_mujoco` of the ProMP authors' code on the point robot."""
    return _run("point-corner", EMAML())


def _run(env: str, algorithm: GradientBased, **settings: Any) -> RunConfig:
    """MAML-TRPO, MAML-VPG and E-MAML at the sizes of the ProMP authors' run scripts.

    Rothfuss et al. 2019, arXiv:1810.06784: 40 tasks, 20 episodes of 100 steps, two hidden layers of 64, one
    log-likelihood inner step of 0.1; for MAML-TRPO and E-MAML a KL bound of 0.01 with 10 steps of conjugate gradient,
    for MAML-VPG one Adam step of 1e-3 (`vpg_run_all` in branch full_code). E-MAML has credit for exploration, on the
    scale of means.
    """
    return RunConfig(env=EnvConfig(name=env), algorithm=algorithm, **settings)


def maml_ppo() -> RunConfig:
    """MAML-PPO on any environment; as on the half-cheetah where none is named."""
    return maml_ppo_half_cheetah_dir()


def maml_ppo_half_cheetah_dir() -> RunConfig:
    """Run forwards or backwards; `maml_ppo_half_cheetah_dir` of garage, with 5 epochs."""
    return _maml_ppo("half-cheetah-dir")


def maml_ppo_point_corner() -> RunConfig:
    """Find one of four corners, sparse reward; garage's `maml_ppo_half_cheetah_dir` on the point robot."""
    return _maml_ppo("point-corner")


def _maml_ppo(env: str) -> RunConfig:
    """MAML-PPO at the sizes of garage's example.

    `maml_ppo_half_cheetah_dir` of garage: 20 tasks, 40 episodes of 100 steps, 300 iterations, two hidden layers of 64,
    one inner step of 0.1, Adam at 1e-3, clipping at 0.2. Five epochs instead of its single step, in which nothing can
    be clipped; the linear baseline instead of its value network, which it does not train.
    """
    return RunConfig(env=EnvConfig(name=env), algorithm=MAMLPPO(), num_tasks=20, episodes_per_task=40, iterations=300)


def dice_maml() -> RunConfig:
    """DICE-MAML on any environment; as on the half-cheetah where none is named."""
    return dice_maml_half_cheetah_dir()


def dice_maml_half_cheetah_dir() -> RunConfig:
    """Run forwards or backwards; `dice_run` of the authors' code."""
    return _dice("half-cheetah-dir", DiceMAML())


def dice_maml_point_corner() -> RunConfig:
    """Find one of four corners, sparse reward; `dice_run` of the authors' code on the point robot."""
    return _dice("point-corner", DiceMAML())


def vpg_dice() -> RunConfig:
    """VPG-DICE on any environment; as on the half-cheetah where none is named."""
    return vpg_dice_half_cheetah_dir()


def vpg_dice_half_cheetah_dir() -> RunConfig:
    """Run forwards or backwards; `vpg_dice_run` of the authors' code."""
    return _vpg_dice("half-cheetah-dir")


def vpg_dice_point_corner() -> RunConfig:
    """Find one of four corners, sparse reward; `vpg_dice_run` of the authors' code on the point robot."""
    return _vpg_dice("point-corner")


def _vpg_dice(env: str) -> RunConfig:
    """As DICE-MAML, but 80 episodes; the return baseline, for the advantages, sees observations as well."""
    advantages = ProcessingConfig(return_baseline=BaselineConfig(name="linear_feature"))
    return _dice(env, VPGDice(), processing=advantages, episodes_per_task=80)


def _dice(env: str, algorithm: GradientBased, **settings: Any) -> RunConfig:
    """The `dice_maml` and `vpg_dice_maml` configurations of the ProMP authors' code (branch full_code).

    40 tasks, 20 episodes of 100 steps, 300 iterations, two hidden layers of 64, one inner step of 0.1, one Adam step of
    1e-3. The reward baseline sees time alone, as in their scripts for DiCE.
    """
    baseline = BaselineConfig(name="linear_time")
    return RunConfig(env=EnvConfig(name=env), algorithm=algorithm, baseline=baseline, iterations=300, **settings)

"""MAML-PPO at the sizes of garage's example.

`maml_ppo_half_cheetah_dir` of garage: 20 tasks, 40 episodes of 100 steps, 300 iterations, two hidden layers of 64, one
inner step of 0.1, Adam at 1e-3, clipping at 0.5. Five epochs instead of its single step, in which nothing can be
clipped; the linear baseline instead of its value network, which it does not train.
"""

from metaloom.pipeline.algorithms.maml.settings import MAMLPPO
from metaloom.pipeline.config.run import RunConfig
from metaloom.pipeline.envs.config import EnvConfig


def maml_ppo_half_cheetah_dir() -> RunConfig:
    """Run forwards or backwards; `maml_ppo_half_cheetah_dir` of garage, with 5 epochs."""
    return _run("half-cheetah-dir")


def maml_ppo_point_corner() -> RunConfig:
    """Find one of four corners, sparse reward; garage's `maml_ppo_half_cheetah_dir` on the point robot."""
    return _run("point-corner")


def _run(env: str) -> RunConfig:
    return RunConfig(env=EnvConfig(name=env), algorithm=MAMLPPO(), num_tasks=20, episodes_per_task=40, iterations=300)

"""Algorithms: hyper-parameters and the equations of a paper, one file each.

Importing this package does not import torch; the numerics are loaded when an algorithm first computes.
"""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from metaloom.pipeline.algorithms.actor_critic.a2c import A2C
from metaloom.pipeline.algorithms.actor_critic.ppo import PPO
from metaloom.pipeline.algorithms.actor_critic.ppo2 import PPO2
from metaloom.pipeline.algorithms.actor_critic.svpg import SVPG
from metaloom.pipeline.algorithms.contract import Algorithm
from metaloom.pipeline.algorithms.maml.settings import DiceMAML
from metaloom.pipeline.algorithms.maml.settings import EMAML
from metaloom.pipeline.algorithms.maml.settings import MAMLPPO
from metaloom.pipeline.algorithms.maml.settings import ProMP
from metaloom.pipeline.algorithms.maml.settings import MAMLTRPO
from metaloom.pipeline.algorithms.maml.settings import MAMLVPG
from metaloom.pipeline.algorithms.maml.settings import VPGDice
from metaloom.pipeline.algorithms.off_policy.dql import DQL
from metaloom.pipeline.algorithms.off_policy.sac import SAC
from metaloom.pipeline.algorithms.pearl.settings import PEARL


def _by_name(value: Any) -> Any:
    """A bare name, such as maml-trpo, stands for that algorithm with its defaults."""
    return {"name": value} if isinstance(value, str) else value


AlgorithmConfig = Annotated[
    Annotated[
        ProMP | MAMLTRPO | MAMLVPG | MAMLPPO | EMAML | DiceMAML | VPGDice | A2C | PPO | PPO2 | SVPG | DQL | SAC | PEARL,
        Field(discriminator="name"),
    ],
    BeforeValidator(_by_name),
]
"""The settings of any algorithm; `name` says which. A bare name stands for the algorithm with its defaults."""

__all__ = [
    "A2C",
    "DQL",
    "EMAML",
    "MAMLPPO",
    "MAMLTRPO",
    "MAMLVPG",
    "PEARL",
    "PPO",
    "PPO2",
    "SAC",
    "SVPG",
    "Algorithm",
    "AlgorithmConfig",
    "DiceMAML",
    "ProMP",
    "VPGDice",
]

"""Algorithms: hyper-parameters and the equations of a paper, one file each.

Importing this package does not import torch; the numerics are loaded when an algorithm first computes.
"""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from pipeline.algorithms.a2c import A2C
from pipeline.algorithms.contract import Algorithm
from pipeline.algorithms.dice_maml import DiceMAML
from pipeline.algorithms.dql import DQL
from pipeline.algorithms.e_maml import EMAML
from pipeline.algorithms.maml_ppo import MAMLPPO
from pipeline.algorithms.maml_trpo import MAMLTRPO
from pipeline.algorithms.maml_vpg import MAMLVPG
from pipeline.algorithms.pearl.settings import PEARL
from pipeline.algorithms.ppo import PPO
from pipeline.algorithms.ppo2 import PPO2
from pipeline.algorithms.promp import ProMP
from pipeline.algorithms.sac import SAC
from pipeline.algorithms.svpg import SVPG
from pipeline.algorithms.vpg_dice import VPGDice


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

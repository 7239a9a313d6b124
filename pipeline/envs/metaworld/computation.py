"""Who computes the rows of a class: rules for all of them at once, or the package's own code one row at a time."""

from collections.abc import Sequence
from typing import Literal, Protocol, get_args

from metaloom.pipeline.envs.contract import EnvError
from metaloom.pipeline.envs.metaworld.oracle import OfficialClass, OracleRows, RowsStep
from metaloom.pipeline.envs.metaworld.physics import RowPhysics
from metaloom.pipeline.envs.metaworld.rows.table import ROW_TASKS
from metaloom.pipeline.envs.metaworld.rows.vectorized import VectorizedRows
from metaloom.pipeline.types import Array

Computation = Literal["auto", "vectorized", "oracle"]
"""`vectorized` by rules for rows, `oracle` by the package, `auto` by rules for the classes that have them."""

_VERSION_OF_RULES = "v2"


class ClassRows(Protocol):
    """N rows of one class.

    Attributes:
        physics: that moves them.
        observations: [N, 39], the first ones.
    """

    physics: RowPhysics
    observations: Array

    def step(self, actions: Array, rows: Array) -> RowsStep:
        """Step n of the rows (sorted, unique) with actions [n, 4] float32."""
        ...


def check_computation(where: str, computation: object, reward_version: str, names: Sequence[str]) -> None:
    """Require that the classes can be computed so.

    Raises:
        EnvError: it is none of Computation, or there are no such rules.
    """
    if computation not in get_args(Computation):
        raise EnvError(f"{where}: computation is {computation!r}; required one of {', '.join(get_args(Computation))}")
    if computation != "vectorized":
        return
    if reward_version != _VERSION_OF_RULES:
        raise EnvError(
            f"{where}: computation is 'vectorized' and reward_version {reward_version!r}; required version "
            f"{_VERSION_OF_RULES!r}, of which the rules for rows are, or computation 'auto' or 'oracle'"
        )
    if missing := [name for name in names if name not in ROW_TASKS]:
        raise EnvError(
            f"{where}: computation is 'vectorized', for which {', '.join(missing)} "
            f"{'has' if len(missing) == 1 else 'have'} no rules; required 'auto' or 'oracle', or classes among "
            f"{', '.join(ROW_TASKS)}"
        )


def computed_by(name: str, computation: Computation, reward_version: str) -> Literal["vectorized", "oracle"]:
    """Which of the two computes a class."""
    by_rules = computation != "oracle" and reward_version == _VERSION_OF_RULES and name in ROW_TASKS
    return "vectorized" if by_rules else "oracle"


def class_rows(official: OfficialClass, goals: Array, num_threads: int, computation: Computation) -> ClassRows:
    """Rows of a class with goals [N, R], at the starts of their episodes."""
    if computed_by(official.name, computation, official.reward_version) == "vectorized":
        return VectorizedRows(official, goals, num_threads)
    return OracleRows(official, goals, num_threads)

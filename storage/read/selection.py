"""Which tasks and episodes of a batch to read."""

from collections.abc import Iterable, Sequence
from operator import index
from typing import Any

import numpy as np

from metaloom.storage.read.committed import CommittedFiles

Places = None | int | range | slice | Sequence[int]
"""All tasks or episodes of a batch, one (negative: from the end), or some, by their places in it.

Batches have them in the order asked for; rows of tables keep the stored order, each once.
"""

Steps = None | int | Sequence[int]
"""All inner steps, one, or some."""


def whole_numbers(chosen: Any, what: str) -> list[int]:
    """The numbers that one or several integers are, Python's or NumPy's.

    Raises:
        ValueError: there is something else among them, such as the true and false of a mask.
    """
    several = isinstance(chosen, Iterable) and not isinstance(chosen, str)
    numbers: list[Any] = [*chosen] if several else [chosen]
    try:
        if any(isinstance(number, bool | np.bool_) for number in numbers):
            raise TypeError
        return [index(number) for number in numbers]
    except TypeError:
        raise ValueError(f"found {what} {chosen!r}; required whole numbers, such as 0 or [0, 2]") from None


def chosen_steps(chosen: Steps) -> list[int] | None:
    """The inner steps that are meant; None for all.

    Raises:
        ValueError: one of them is none.
    """
    numbers = None if chosen is None else whole_numbers(chosen, "inner step")
    if wrong := [number for number in numbers or () if number < 0]:
        raise ValueError(f"found inner step {wrong[0]}; required one from 0")
    return numbers


def places(chosen: Places, count: int, what: str) -> list[int]:
    """The places that are meant, of `count` there are.

    Args:
        chosen: which.
        count: how many there are.
        what: they are, as errors say it: "task" or "episode".

    Raises:
        ValueError: there is no such place.
    """
    if chosen is None or isinstance(chosen, slice):
        return [*range(count)[chosen or slice(None)]]
    numbers = whole_numbers(chosen, what)
    if wrong := [number for number in numbers if not -count <= number < count]:
        raise ValueError(f"found {what} {wrong[0]}; required one from 0 to {count - 1}, or -1 to -{count} from the end")
    return [number % count for number in numbers]


def shape_of_rounds(files: CommittedFiles, group: str) -> tuple[int, int, int]:
    """B, E and T of the batches of episodes in a group.

    Raises:
        DamagedRun: there are none, or their metadata is damaged.
    """
    B, E, T = files.spec(f"{group}/rewards").shape
    return B, E, T

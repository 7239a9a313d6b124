"""Which tasks and episodes of a batch to read."""

from collections.abc import Sequence

from metaloom.storage.read.committed import CommittedFiles

Places = None | int | range | slice | Sequence[int]
"""All tasks or episodes of a batch, one (negative: from the end), or some, by their places in it."""


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
    numbers = [chosen] if isinstance(chosen, int) else [int(number) for number in chosen]
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

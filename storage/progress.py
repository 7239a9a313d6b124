"""Progress callbacks for work on a run."""

from collections.abc import Callable

Progress = Callable[[int, int], None]  # callback that receives the number of finished items and the total


def unseen(done: int, total: int) -> None:
    """Do nothing, for callers that do not track progress."""

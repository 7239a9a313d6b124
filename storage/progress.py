"""Progress of work on a run."""

from collections.abc import Callable

Progress = Callable[[int, int], None]
"""Receives the number of finished items and the number of all."""


def unseen(done: int, total: int) -> None:
    """Show nothing."""

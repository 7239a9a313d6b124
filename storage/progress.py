"""Progress of work on a run."""

from collections.abc import Callable

Progress = Callable[[int, int], None]
"""Receives how many of all are done, and how many all are."""


def unseen(done: int, total: int) -> None:
    """Show nothing."""

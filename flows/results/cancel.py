"""A run that was asked to stop."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Cancelled:
    """State of a run after its writer was asked to stop.

    Attributes:
        went_well: True if it stopped or was complete first, or nobody wrote it; False if it failed.
        message: State of the run, in words.
    """

    went_well: bool
    message: str

    def __str__(self) -> str:
        return self.message

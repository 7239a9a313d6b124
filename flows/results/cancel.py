"""A run that was asked to stop."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Cancelled:
    """How a run stands after its writer was asked to stop.

    Attributes:
        went_well: It stopped or was complete first, or nobody wrote it; it did not fail.
        message: How it stands, in words.
    """

    went_well: bool
    message: str

    def __str__(self) -> str:
        return self.message

"""Findings about a machine."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Check:
    """One finding.

    Attributes:
        name: Subject of the check.
        status: One of: fail: training does not work; warn: it works, but worse than it could; ok.
        found: Actual state.
        required: Required state.
        advice: What helps; empty when the status is ok, or `found` says it.
    """

    name: str
    status: Literal["ok", "warn", "fail"]
    found: str
    required: str
    advice: str = ""

    @property
    def ok(self) -> bool:
        """True if training works in spite of it."""
        return self.status != "fail"


class Checks(tuple[Check, ...]):
    """All findings."""

    @property
    def ok(self) -> bool:
        """True if training works in spite of them."""
        return all(check.ok for check in self)

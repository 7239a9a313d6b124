"""Findings about a machine."""

from dataclasses import dataclass
from typing import Literal

from metaloom.pipeline.shown import Row, Shown


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


class Checks(Shown, tuple[Check, ...]):
    """All findings."""

    def shown(self) -> tuple[str, list[Row]]:
        """Status, found and required state of each; see pipeline.shown."""
        return f"Checks: {'all is well' if self.ok else 'something is wrong'}", [
            (check.status, check.name, check.found, check.required) for check in self
        ]

    @property
    def ok(self) -> bool:
        """True if training works in spite of them."""
        return all(check.ok for check in self)

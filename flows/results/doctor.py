"""Results of the operation `doctor`, which checks a machine or an environment."""

from dataclasses import dataclass
from typing import Literal

from metaloom.pipeline.shown import Row, Shown


@dataclass(frozen=True)
class Check:
    """Result of a check, with the actual and the required state, and a remedy."""

    name: str
    status: Literal["ok", "warn", "fail"]  # warn: training works with limitations; fail: it does not
    found: str
    required: str
    advice: str = ""

    @property
    def ok(self) -> bool:
        """True if training works."""
        return self.status != "fail"


class Checks(Shown, tuple[Check, ...]):
    """Results of all checks."""

    def shown(self) -> tuple[str, list[Row]]:
        return f"Checks: {'all is well' if self.ok else 'something is wrong'}", [
            (check.status, check.name, check.found, check.required) for check in self
        ]

    @property
    def ok(self) -> bool:
        """True if training works."""
        return all(check.ok for check in self)

"""Results of checking a machine or an environment."""

from dataclasses import dataclass
from typing import Literal

from metaloom.pipeline.shown import Row, Shown


@dataclass(frozen=True)
class Check:
    """Result of a check.

    Attributes:
        name: Subject of the check.
        status: fail if training does not work, warn if it works worse than it could, otherwise ok.
        found: Actual state.
        required: Required state.
        advice: Remedy; may be empty.
    """

    name: str
    status: Literal["ok", "warn", "fail"]
    found: str
    required: str
    advice: str = ""

    @property
    def ok(self) -> bool:
        """True unless training does not work."""
        return self.status != "fail"


class Checks(Shown, tuple[Check, ...]):
    """Results of all checks."""

    def shown(self) -> tuple[str, list[Row]]:
        """Return status, found and required state of each check; see pipeline.shown."""
        return f"Checks: {'all is well' if self.ok else 'something is wrong'}", [
            (check.status, check.name, check.found, check.required) for check in self
        ]

    @property
    def ok(self) -> bool:
        """True unless training does not work."""
        return all(check.ok for check in self)

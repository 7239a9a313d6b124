"""Results of checking a machine, an environment or a run."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from metaloom.flows.formatting import plural
from metaloom.pipeline.shown import Row, Shown
from metaloom.storage import Damage, argument


@dataclass(frozen=True)
class Check:
    """Result of a check: the actual state, the required state and a remedy."""

    name: str
    status: Literal["ok", "warn", "fail"]  # warn: training works with limitations; fail: it does not
    found: str
    required: str
    advice: str = ""

    @property
    def ok(self) -> bool:
        """True unless the check failed: training works, possibly with limitations."""
        return self.status != "fail"


class Checks(Shown, tuple[Check, ...]):
    """Results of all checks of a machine or an environment."""

    def shown(self) -> tuple[str, list[Row]]:
        return f"Checks: {'all is well' if self.ok else 'something is wrong'}", [
            (check.status, check.name, check.found, check.required) for check in self
        ]

    @property
    def ok(self) -> bool:
        """True if no check failed: training works, possibly with limitations."""
        return all(check.ok for check in self)


@dataclass(frozen=True, repr=False)
class Verification(Shown):
    """Result of checking the files of a run."""

    path: Path
    damages: tuple[Damage, ...]
    # True if the newest session sealed its records, so that a missing one would be detected; not checked after damage.
    sealed: bool = True

    def shown(self) -> tuple[str, list[Row]]:
        found = "every file is intact" if self.intact else f"{plural(len(self.damages), 'file')} damaged"
        return f"Verification of {self.path}: {found}", [(damage.file, damage.problem) for damage in self.damages]

    @property
    def intact(self) -> bool:
        """True if no file is damaged."""
        return not self.damages

    def as_list(self) -> list[dict[str, Any]]:
        return [asdict(damage) for damage in self.damages]


def what_helps(folder: Path, damages: Sequence[Damage]) -> Iterator[str]:
    """Yield advice on handling the damage."""
    if any(damage.is_unreadable for damage in damages):
        yield "files that you may not read were not checked: their owner can grant access or verify the run"
    elif any(damage.is_link and not damage.is_foreign for damage in damages):
        yield f"a run must not contain links; copy the files they point to: cp -rL {argument(folder)} COPY"
        return
    elif any(not damage.is_foreign for damage in damages):
        yield f"repair it with: metaloom resume {argument(folder)} --repair"
    if any(damage.is_foreign for damage in damages):
        yield "remove or move files that do not belong to the run; Metaloom leaves them in place"

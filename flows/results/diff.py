"""Differences between two runs."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from metaloom.flows.formatting import plural
from metaloom.flows.results.replay import ArrayDifference, difference_info
from metaloom.pipeline.shown import Row, Shown
from metaloom.storage import StageRef


@dataclass(frozen=True)
class Difference:
    """Setting or version that differs; a run that lacks it has None."""

    name: str
    a: str | None
    b: str | None


@dataclass(frozen=True, repr=False)
class RunDiff(Shown):
    """Differences between two runs.

    Attributes:
        a, b: Folders of the runs.
        environment: Differences in code digest, package versions and machine, which do not affect `equal`.
        first: First output of both runs whose digests differ.
        arrays: Arrays of that output that differ; only their names are known if the output was thinned.
        compared: Number of outputs that both runs have.
        different: Number of these outputs that differ.
        only_a, only_b: Number of outputs that only one of the runs has.
    """

    a: Path
    b: Path
    settings: tuple[Difference, ...]
    environment: tuple[Difference, ...]
    first: StageRef | None
    arrays: tuple[ArrayDifference, ...]
    compared: int
    different: int
    only_a: int
    only_b: int

    def shown(self) -> tuple[str, list[Row]]:
        found = f"first difference in {self.first}" if self.first else f"{plural(self.compared, 'output')} equal"
        missing = f"; {self.only_a} and {self.only_b} are in one run only" if self.only_a or self.only_b else ""
        rows = [(d.name, str(d.a), str(d.b)) for d in (*self.settings, *self.environment)]
        header = [("setting", self.a.name, self.b.name)] if rows else []
        return f"RunDiff of {self.a.name} and {self.b.name}: {found}{missing}", [*header, *rows]

    @property
    def equal(self) -> bool:
        """True if all settings and outputs are the same."""
        return not (self.settings or self.different or self.only_a or self.only_b)

    def as_dict(self) -> dict[str, Any]:
        first = self.first
        return {
            "a": str(self.a),
            "b": str(self.b),
            "equal": self.equal,
            "settings": {d.name: {"a": d.a, "b": d.b} for d in self.settings},
            "environment": {d.name: {"a": d.a, "b": d.b} for d in self.environment},
            "first": first and {**asdict(first), "arrays": [difference_info(array) for array in self.arrays]},
            "compared": self.compared,
            "different": self.different,
            "only_a": self.only_a,
            "only_b": self.only_b,
        }

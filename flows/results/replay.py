"""Results of replaying stages, and differences between runs."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from metaloom.flows.formatting import finite, plural
from metaloom.pipeline.device import EQUAL_IN_WORDS, EqualityClass
from metaloom.pipeline.shown import Row, Shown
from metaloom.storage import StageRef


@dataclass(frozen=True)
class ArrayDifference:
    """Difference between a replayed array and the stored one."""

    ref: StageRef  # stage whose output contains the array
    array: str
    index: tuple[int, ...]  # index of the first element that differs; empty if shapes or dtypes differ
    stored: str  # stored value of that element, or the stored array's shape and dtype
    replayed: str  # replayed value of that element, or the replayed array's shape and dtype
    max_abs: float  # largest absolute difference
    max_ulp: int | None  # largest difference in units in the last place; None for integers and booleans
    count: int  # number of elements that differ


@dataclass(frozen=True)
class StageReplay:
    """Result of replaying a stage."""

    ref: StageRef
    differences: tuple[ArrayDifference, ...]
    seconds_stored: float  # duration of the original computation
    equality: EqualityClass = "bits"  # kind of equality that a replay on this device can establish
    with_record: bool = False  # True if only record digests could be compared, because the output was thinned
    changed: tuple[str, ...] = ()  # changes since the original computation that may explain differences

    @property
    def identical(self) -> bool:
        """True if the replay is bitwise identical to the stored output."""
        return not self.differences

    @property
    def proved(self) -> str:
        """Description of a replay without differences; it is called identical only on the CPU."""
        return EQUAL_IN_WORDS[self.equality]

    def as_dict(self) -> dict[str, Any]:
        return {
            **asdict(self.ref),
            "identical": self.identical,
            "equality": self.equality,
            "compared_with": "record" if self.with_record else "arrays",
            "differences": [difference_info(difference) for difference in self.differences],
            "changed": list(self.changed),
        }


class Replay(Shown, list[StageReplay]):
    """Results of replayed stages, in order."""

    def shown(self) -> tuple[str, list[Row]]:
        different = [outcome for outcome in self if not outcome.identical]
        proved = f"all {self[-1].proved}" if self and not different else f"{len(different)} differ"
        differences = (difference for outcome in different for difference in outcome.differences)
        rows = [(str(d.ref), d.array, f"{d.count} values", f"by up to {d.max_abs:.3g}") for d in differences]
        return f"Replay of {plural(len(self), 'stage')}: {proved}", rows

    @property
    def identical(self) -> bool:
        """True if all replays are bitwise identical to the stored outputs."""
        return all(outcome.identical for outcome in self)


def difference_info(difference: ArrayDifference) -> dict[str, Any]:
    about = asdict(difference)
    return {**about.pop("ref"), **about, "index": list(difference.index), "max_abs": finite(difference.max_abs)}


@dataclass(frozen=True)
class Difference:
    """Setting or version that differs between runs; the value is None for a run that lacks it."""

    name: str
    a: str | None
    b: str | None


@dataclass(frozen=True, repr=False)
class RunDiff(Shown):
    """Differences between two runs."""

    a: Path  # folder of the first run
    b: Path
    settings: tuple[Difference, ...]
    environment: tuple[Difference, ...]  # code digest, package versions and machine, which do not affect `equal`
    first: StageRef | None  # first output of both runs whose digests differ
    arrays: tuple[ArrayDifference, ...]  # differing arrays of `first`; if it was thinned, only their names are known
    compared: int  # number of outputs that both runs have
    different: int  # number of these outputs that differ
    only_a: int  # number of outputs that only the first run has
    only_b: int

    def shown(self) -> tuple[str, list[Row]]:
        found = f"first difference in {self.first}" if self.first else f"{plural(self.compared, 'output')} equal"
        missing = f"; {self.only_a} only in a, {self.only_b} only in b" if self.only_a or self.only_b else ""
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

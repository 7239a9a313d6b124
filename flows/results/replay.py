"""Results of replaying stages."""

from dataclasses import asdict, dataclass
from typing import Any

from metaloom.flows.formatting import finite, plural
from metaloom.pipeline.device import EQUAL_IN_WORDS, EqualityClass
from metaloom.pipeline.shown import Row, Shown
from metaloom.storage import StageRef


@dataclass(frozen=True)
class ArrayDifference:
    """Difference between a replayed array and the stored one.

    Attributes:
        ref: Stage whose output contains the array.
        index: Index of the first element that differs; empty if shapes or dtypes differ.
        stored, replayed: That element in each array, or each array's shape and dtype.
        max_abs: Largest absolute difference.
        max_ulp: Largest difference in units in the last place; None for integers and booleans.
        count: Number of elements that differ.
    """

    ref: StageRef
    array: str
    index: tuple[int, ...]
    stored: str
    replayed: str
    max_abs: float
    max_ulp: int | None
    count: int


@dataclass(frozen=True)
class StageReplay:
    """Result of replaying a stage.

    Attributes:
        seconds_stored: Duration of the original computation.
        equality: Kind of equality that a replay on this device can establish.
        with_record: True if only record digests were available for comparison, because the output was thinned.
        changed: Changes since the original computation that may explain differences; empty without differences.
    """

    ref: StageRef
    differences: tuple[ArrayDifference, ...]
    seconds_stored: float
    equality: EqualityClass = "bits"
    with_record: bool = False
    changed: tuple[str, ...] = ()

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
        rows = [
            (str(d.ref), d.array, f"{d.count} values", f"by up to {d.max_abs:.3g}")
            for o in different
            for d in o.differences
        ]
        return f"Replay of {plural(len(self), 'stage')}: {proved}", rows

    @property
    def identical(self) -> bool:
        """True if all replays are bitwise identical to the stored outputs."""
        return all(outcome.identical for outcome in self)


def difference_info(difference: ArrayDifference) -> dict[str, Any]:
    about = asdict(difference)
    return {**about.pop("ref"), **about, "index": list(difference.index), "max_abs": finite(difference.max_abs)}

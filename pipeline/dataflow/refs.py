"""References to stage outputs. Flows pass these around instead of arrays."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")  # regular expression for stage names
_FILE_NAME = re.compile(rf"(\d{{8}})\.({NAME.pattern})\.(\d{{1,4}})\.json")
_LIMIT = 10**8


@dataclass(frozen=True)
class StageRef:
    """Reference to the output of a single stage execution."""

    iteration: int  # iteration number, counted from 0
    stage: str  # stage name
    step: int = 0  # inner step k; 0 for stages without inner steps

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.stage):
            raise ValueError(
                f"StageRef.stage is {self.stage!r}; expected lowercase letters, digits and _, such as adapt"
            )
        if not (0 <= self.iteration < _LIMIT and 0 <= self.step < 10**4):
            raise ValueError(
                f"StageRef has iteration {self.iteration} and step {self.step}; expected 0 to 99999999 and 0 to 9999"
            )

    def __str__(self) -> str:
        return f"{self.stage}(i={self.iteration}, k={self.step})"

    @property
    def where(self) -> str:
        """Position as text for error messages."""
        return f"iteration {self.iteration}, {self.stage} k={self.step}"

    def document(self) -> dict[str, Any]:
        """Return the reference as JSON data."""
        return {"iteration": self.iteration, "stage": self.stage, "step": self.step}

    @classmethod
    def parse(cls, document: Mapping[str, Any]) -> "StageRef":
        """Read a reference from JSON data."""
        return cls(int(document["iteration"]), str(document["stage"]), int(document["step"]))

    @property
    def file_name(self) -> str:
        """File name of the output's commit record."""
        return f"{self.iteration:08d}.{self.stage}.{self.step}.json"

    @classmethod
    def from_file_name(cls, name: str) -> "StageRef | None":
        """Return the reference for a commit record's file name, or None if the name is not valid."""
        match = _FILE_NAME.fullmatch(name)
        if match is None:
            return None
        ref = cls(int(match[1]), match[2], int(match[3]))
        return ref if ref.file_name == name else None


@dataclass(frozen=True)
class Span:
    """All outputs of some stages over consecutive iterations, as an input that a stage reads on demand.

    A record can thus refer to all outputs so far without a list that grows with the run. All inner steps of the stages
    are included, from iteration `first` to `last`, inclusive; an iteration need not contain every stage.
    """

    stages: tuple[str, ...]
    first: int
    last: int

    def __post_init__(self) -> None:
        if not self.stages or not 0 <= self.first <= self.last:
            raise ValueError(
                f"Span has the stages {self.stages} and iterations {self.first} to {self.last}; it needs one stage or "
                "more, and iterations in ascending order"
            )

    def __str__(self) -> str:
        return f"{'|'.join(self.stages)}(i={self.first}..{self.last})"

    def __contains__(self, ref: StageRef) -> bool:
        return ref.stage in self.stages and self.first <= ref.iteration <= self.last


class StageOrder:
    """Order in which a run computes outputs. Consecutive stepped stages run step by step.

    `stages` are names in data-flow order, each with True if the stage may have several outputs per iteration.
    """

    def __init__(self, stages: Iterable[tuple[str, bool]]) -> None:
        self._places: dict[str, tuple[int, int]] = {}
        block, before = 0, False  # block: index of the first of consecutive stepped stages, or of the stage itself
        for n, (name, stepped) in enumerate(stages):
            block = block if stepped and before else n
            self._places[name], before = (block, n), stepped

    def position(self, ref: StageRef) -> tuple[int, int, int, int]:
        """Return the sort key of a reference."""
        block, place = self._places.get(ref.stage, (len(self._places), 0))
        return (ref.iteration, block, ref.step, place)

    def sort(self, refs: Iterable[StageRef]) -> list[StageRef]:
        """Return references sorted in the order in which a run computes the outputs."""
        return sorted(refs, key=self.position)

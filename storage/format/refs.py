"""References to stage outputs: what flows pass around instead of arrays."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

STAGES = (
    "initialize",
    "fill_memory",
    "sample_tasks",
    "collect_rollouts",
    "process_samples",
    "adapt",
    "sample_transitions",
    "meta_optimize",
    "update",
    "evaluate",
)
"""The stages of all runs, in the order data passes."""

LAST_STAGES = ("meta_optimize", "update")
"""Stages that end an iteration, on policy and off policy: they yield its metrics and the next one's learner.

All iterations of a run, and of its forks, end with the same one.
"""

_ROUNDS = ("collect_rollouts", "process_samples", "adapt")
"""Stages that come once per inner step."""
_ROUND_PLACE = STAGES.index(_ROUNDS[0])
_PLACES = {stage: (_ROUND_PLACE if stage in _ROUNDS else n, n) for n, stage in enumerate(STAGES)}
_FILE_NAME = re.compile(r"(\d{8})\.([a-z_]+)\.(\d{1,4})\.json")
_LIMIT = 10**8


@dataclass(frozen=True)
class StageRef:
    """The output of one execution of one stage. References sort in the order in which a run computes them.

    Attributes:
        iteration: from 0.
        stage: one of STAGES.
        step: inner step k; 0 where a stage has none.
    """

    iteration: int
    stage: str
    step: int = 0

    def __post_init__(self) -> None:
        if self.stage not in STAGES:
            raise ValueError(f"StageRef.stage is {self.stage!r}; required one of {', '.join(STAGES)}")
        if not (0 <= self.iteration < _LIMIT and 0 <= self.step < 10**4):
            raise ValueError(
                f"StageRef has iteration {self.iteration} and step {self.step}; required 0 to 99999999 and 0 to 9999"
            )

    def __lt__(self, other: "StageRef") -> bool:
        return self.position < other.position

    def __str__(self) -> str:
        return f"{self.stage}(i={self.iteration}, k={self.step})"

    @property
    def position(self) -> tuple[int, int, int, int]:
        """What references sort by; as a `key` it sorts many of them several times as fast as they do by themselves.

        Stages of an inner step come step by step, between those that an iteration begins and ends with.
        """
        phase, stage = _PLACES[self.stage]
        return (self.iteration, phase, self.step, stage)

    @property
    def ends_iteration(self) -> bool:
        """Whether the iteration is complete with this output."""
        return self.stage in LAST_STAGES

    @property
    def file_name(self) -> str:
        """The name of the commit record that makes this output exist."""
        return f"{self.iteration:08d}.{self.stage}.{self.step}.json"

    @classmethod
    def from_file_name(cls, name: str) -> "StageRef | None":
        """The reference whose commit record has this name, None for a name that no record has."""
        match = _FILE_NAME.fullmatch(name)
        if match is None or match[2] not in STAGES:
            return None
        ref = cls(int(match[1]), match[2], int(match[3]))
        return ref if ref.file_name == name else None


def learner_ref(iteration: int, last_stage: str = "meta_optimize") -> StageRef:
    """The stage whose output is the learner that iteration `iteration` starts from.

    Args:
        iteration: from 0.
        last_stage: the stage that ends the run's iterations; `Run.learner_ref` knows it.
    """
    return StageRef(0, "initialize") if iteration == 0 else StageRef(iteration - 1, last_stage)


@dataclass(frozen=True)
class Span:
    """All outputs of some stages over consecutive iterations: one input that a stage reads what it needs of.

    Such as everything that was collected so far, which a record can name without a list that grows with the run.

    Attributes:
        stages: their names; all inner steps of each count, and an iteration need not have every stage.
        first: the first iteration.
        last: the last iteration, which is included.
    """

    stages: tuple[str, ...]
    first: int
    last: int

    def __post_init__(self) -> None:
        if not self.stages or not 0 <= self.first <= self.last:
            raise ValueError(
                f"Span has the stages {self.stages} and iterations {self.first} to {self.last}; required one stage or "
                "more, and iterations in order"
            )

    def __str__(self) -> str:
        return f"{'|'.join(self.stages)}(i={self.first}..{self.last})"

    def __contains__(self, ref: StageRef) -> bool:
        return ref.stage in self.stages and self.first <= ref.iteration <= self.last

    def of(self, refs: Iterable[StageRef]) -> list[StageRef]:
        """Those of some references that are in the span, in their order."""
        return [ref for ref in refs if ref in self]

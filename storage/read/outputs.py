"""Reading of a stored run's outputs, or only of selected tasks and episodes."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import index
from pathlib import Path
from typing import Any, cast

import numpy as np

from metaloom.pipeline.dataflow.refs import StageRef
from metaloom.pipeline.types import Array, EpisodeBatch
from metaloom.storage.errors import StageMissing
from metaloom.storage.format.codec import Value
from metaloom.storage.format.places import argument, location
from metaloom.storage.format.records import StageRecord
from metaloom.storage.format.stages import StageTable
from metaloom.storage.format.thinning import thinnable
from metaloom.storage.read.committed import CommittedFiles
from metaloom.storage.read.info import mapping
from metaloom.storage.remote.log import RemoteLog

Places = None | int | range | slice | Sequence[int]
"""Selection of a batch's tasks or episodes: None for all, one index (negative: from the end), or several.

Batches keep the requested order. Tables keep the stored order, without duplicates.
"""

Steps = None | int | Sequence[int]  # selection of inner steps: None for all, one, or several


def whole_numbers(chosen: Any, what: str) -> list[int]:
    """Convert one or several Python or NumPy integers to a list. Raises ValueError for anything else."""
    several = isinstance(chosen, Iterable) and not isinstance(chosen, str)
    numbers: list[Any] = [*chosen] if several else [chosen]
    try:
        if any(isinstance(number, bool | np.bool_) for number in numbers):
            raise TypeError
        return [index(number) for number in numbers]
    except TypeError:
        raise ValueError(f"{what} must be an integer or a list of them, such as 0 or [0, 2], got {chosen!r}") from None


def chosen_steps(chosen: Steps) -> list[int] | None:
    """Return the selected inner steps as a list, or None for all."""
    numbers = None if chosen is None else whole_numbers(chosen, "inner step")
    if wrong := [number for number in numbers or () if number < 0]:
        raise ValueError(f"got inner step {wrong[0]}; inner steps start at 0")
    return numbers


def places(chosen: Places, count: int, what: str) -> list[int]:
    """Return a selection as indices below `count`; `what` names the items in errors."""
    if chosen is None or isinstance(chosen, slice):
        return [*range(count)[chosen or slice(None)]]
    numbers = whole_numbers(chosen, what)
    if wrong := [number for number in numbers if not -count <= number < count]:
        raise ValueError(f"no {what} {wrong[0]}; choose one from 0 to {count - 1}, or -1 to -{count} from the end")
    return [number % count for number in numbers]


class StoredOutputs:
    """Outputs of a run, including new ones that a writer adds later.

    `path` is the folder of the run, or the cache folder of a run under a URL; `info` is the content of its run.json.
    """

    def __init__(self, path: Path, info: Mapping[str, Any], remote: RemoteLog | None = None) -> None:
        self.path = path
        self.info = info
        self.files: CommittedFiles = CommittedFiles(path, StageTable.of(info), remote)

    @property
    def location(self) -> str:
        """URL of the run if `path` is a cache of object storage, otherwise the path."""
        return location(self.path)

    @property
    def capacity(self) -> int:
        """Target number of iterations. Raises DamagedRun if the file that stores it is missing or changed."""
        return self.files.capacity()

    def components(self, axis: str) -> Mapping[str, str]:
        """Return the units of `observation` or `action` components, keyed by name; empty if none were declared."""
        declared = mapping(mapping(self.info["environment"].get("components")).get(axis))
        # A run from elsewhere may contain anything.
        members = [cast(object, declared.get(member)) for member in ("names", "units")]
        names, units = (cast(list[object], member) if isinstance(member, list) else [] for member in members)
        return {str(name): str(unit) for name, unit in zip(names, units, strict=False)}

    @property
    def facts(self) -> Mapping[str, str]:
        """Units of the environment's facts, keyed by name."""
        declared = mapping(self.info["environment"].get("facts"))
        return {name: str(mapping(fact).get("unit", "1")) for name, fact in declared.items()}

    @property
    def stages(self) -> StageTable:
        """Stages of the run."""
        return self.files.stages

    def learner_ref(self, iteration: int) -> StageRef:
        """Return a reference to the learner that an iteration starts from, whether stored or not."""
        return self.stages.learner_ref(iteration)

    def last_ref(self, iteration: int) -> StageRef:
        """Return a reference to the output that ends an iteration, whether stored or not."""
        return self.stages.last_ref(iteration)

    @property
    def iterations(self) -> range:
        """Complete iterations before the first incomplete one."""
        return range(self.files.num_iterations())

    def refs(self) -> list[StageRef]:
        """Return references to all stored outputs, in the order they were computed."""
        return self.stages.sort(self.files.refs())

    def refs_of(self, iterations: Collection[int]) -> list[StageRef]:
        """Return references to the stored outputs of some iterations, in the order they were computed."""
        return self.stages.sort(self.files.refs(iterations))

    def contains(self, ref: StageRef) -> bool:
        """Return True if an output is stored."""
        return self.files.contains(ref)

    def is_thinned(self, ref: StageRef) -> bool:
        """Return True if an output's arrays were removed by thinning; its record, tables and metrics remain.

        Raises StageMissing if the output is not stored.
        """
        marked = self.files.thinned(ref.iteration).get(ref)
        if marked is None and self.contains(ref):
            return False  # the common case, which does not need the record
        return marked == self.record(ref).sha256

    def thinnable(self, iterations: Collection[int]) -> list[StageRef]:
        """Return references to some iterations' stored outputs whose arrays thinning may remove or has removed."""
        return thinnable(self.files.refs(iterations), {*iterations}, self.stages)

    def thinned_iterations(self) -> list[int]:
        """Return the iterations that are at least partly thinned, in order."""
        return self.files.thinned_iterations()

    def record(self, ref: StageRef) -> StageRecord:
        """Read an output's record, with its inputs and checksums. Raises StageMissing if the output is not stored."""
        try:
            return self.files.record(ref)
        except FileNotFoundError:
            steps = [r.step for r in self.refs_of([ref.iteration]) if r.stage == ref.stage]
        if steps and ref.iteration in self.iterations:
            raise StageMissing(
                self.location,
                found=f"{ref} is not stored, and iteration {ref.iteration} is complete",
                required=f"an inner step of the iteration: {', '.join(map(str, steps))}",
                action=f"`metaloom show {argument(self.path)}@{ref.iteration}` lists them",
            )
        raise self._incomplete(ref.iteration, f"{ref} is not stored")

    def load(self, ref: StageRef, *, task: Places = None) -> Value:
        """Load an output, or only its parts for the tasks at some indices, checking every chunk against its record.

        Raises:
            ValueError: a task does not exist, or the output has no task axis.
            StageMissing: the output is not stored.
            StageThinned: its arrays were removed.
            DamagedRun: a file is missing or changed.
        """
        record = self.record(ref)
        return self.files.read_value(record, self.chosen_tasks(record, task))

    def chosen_tasks(self, record: StageRecord, task: Places) -> list[int] | None:
        """Return a selection of an output's tasks as indices, or None for all."""
        if task is None:
            return None
        specs = (self.files.spec(chunk.array) for chunk in record.chunks)
        counts = {spec.shape[0] for spec in specs if spec.dims[1:2] == ("task",)}
        if len(counts) != 1:
            raise ValueError(f"got task={task!r} for {record.ref}, whose arrays have no task axis; omit `task`")
        return places(task, counts.pop(), "task")

    def lengths(self, ref: StageRef) -> Array:
        """Read only the episode lengths of a stored batch, [B, E] int32. Raises the same errors as `load`."""
        return self.files.read_lengths(self.record(ref))

    def experience(self, ref: StageRef) -> EpisodeBatch:
        """Load episodes without behavior, reward terms, facts and initial states. Raises the same errors as `load`."""
        return self.files.read_experience(self.record(ref))

    def _incomplete(self, iteration: int, found: str | None = None) -> StageMissing:
        count = len(self.iterations)
        # A run that has reached its target needs a higher one to continue.
        further = f" --iterations {iteration + 1}" if iteration >= self.capacity else ""
        return StageMissing(
            self.location,
            found=f"{found or f'iteration {iteration} does not exist'}; {count} iterations are complete",
            required=f"an iteration from 0 to {count - 1}" if count else "a run with a complete iteration",
            action=f"`metaloom resume {argument(self.path)}{further}` computes what is missing",
        )

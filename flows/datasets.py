"""Stored episodes as a torch Dataset of transitions, episodes or trials."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler

from metaloom.flows.errors import UsageError
from metaloom.pipeline.types import Array
from metaloom.storage import Run, StageMissing, StageRef, argument
from metaloom.storage.read.outputs import Steps, chosen_steps
from metaloom.storage.run import Iterations

Unit = Literal["transitions", "episodes", "trials"]
"""Unit of an item: a real step, a real episode, or all of a task's episodes in an iteration, by inner step."""

Item = dict[str, torch.Tensor]

_ARRAYS = ("observations", "actions", "rewards", "terminated", "truncated", "lengths")
_POOL = 64
_CACHED_PARTS = 2 * _POOL


@dataclass(frozen=True)
class _Part:
    """Unit of reading: a task's episodes in some inner steps of an iteration."""

    iteration: int
    steps: tuple[int, ...]
    task: int


class RunDataset(Dataset[Item]):
    """Transitions, episodes or trials of a run, sorted by iteration, inner step, task, episode and t.

    An item is a mapping of tensors. Indexing with a list returns stacked items, for loading batches. Reading an item
    loads its task's part of the arrays; recent parts are cached. `sampler` shuffles in an order that suits the cache.

    Args:
        run: Run to read. Its thinned batches must be recomputed or excluded.
        unit: Unit of an item.
        iterations, steps: Iterations and inner steps to include; None for all complete ones.

    Raises:
        UsageError: the unit does not exist.
        storage.StageMissing, storage.StageThinned: the episodes do not exist, or were thinned.
    """

    def __init__(self, run: Run, unit: Unit, iterations: Iterations = None, steps: Steps = None) -> None:
        if unit not in get_args(Unit):
            raise UsageError(f"unit must be one of {', '.join(get_args(Unit))}, got {unit!r}")
        self.unit, self._run, self._stage = unit, run, run.stages.named("rollouts")
        found = [*self._find(run.select(iterations), steps)]
        self._parts = [part for part, _ in found]
        self._ends = np.cumsum([0, *(count for _, count in found)])
        self._cache: OrderedDict[_Part, dict[str, Array]] = OrderedDict()

    def __repr__(self) -> str:
        return f"RunDataset({len(self):,} {self.unit} of {self._run.location!r})"

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cache": OrderedDict()}

    def __getitem__(self, index: int | Sequence[int]) -> Item:
        """Return one item, or several items stacked along a new first axis."""
        if isinstance(index, int | np.integer):
            return {name: values[0] for name, values in self[[int(index)]].items()}
        indices = np.asarray(index)
        if indices.size and indices.dtype.kind not in "iu":  # such as a mask, which must not be read as indices 0 and 1
            raise IndexError(f"indices must be integers, got dtype {indices.dtype}")
        indices = indices.astype(np.int64)
        if (outside := indices[(indices < 0) | (indices >= len(self))]).size:
            raise IndexError(f"index {outside[0]} is out of range; expected 0 to {len(self) - 1}")
        numbers = np.searchsorted(self._ends, indices, side="right") - 1
        offsets = indices - self._ends[numbers]
        stacked: dict[str, Array] = {}
        for number in np.unique(numbers):
            chosen = np.flatnonzero(numbers == number)
            for name, values in self._items(self._parts[number], offsets[chosen]).items():
                if name not in stacked:
                    stacked[name] = np.empty((len(indices), *values.shape[1:]), values.dtype)
                stacked[name][chosen] = values
        return {name: torch.from_numpy(values) for name, values in stacked.items()}

    def __getitems__(self, indices: list[int]) -> list[Item]:
        """Return several items that are read together; `DataLoader` calls this for a batch."""
        stacked = self[indices]
        return [{name: values[i] for name, values in stacked.items()} for i in range(len(indices))]

    def sampler(self, seed: int = 0, *, pool: int = _POOL) -> "PartSampler":
        """Return a sampler that shuffles parts, then items within groups of `pool` parts. Each part is read once."""
        return PartSampler(self._ends, seed, pool)

    def _find(self, iterations: Sequence[int], steps: Steps) -> Iterator[tuple[_Part, int]]:
        wanted = {*iterations}
        refs = [ref for ref in self._run.refs() if ref.stage == self._stage and ref.iteration in wanted]
        chosen = chosen_steps(steps)
        refs = [ref for ref in refs if chosen is None or ref.step in chosen]
        if not refs:
            raise StageMissing(
                self._run.location,
                found="no episodes of these iterations and inner steps",
                required="a complete iteration with episodes",
                action=f"`metaloom show {argument(self._run.path)}` lists what is stored",
            )
        if self.unit != "trials":
            for ref in refs:
                lengths = self._run.lengths(ref)
                counts = (lengths if self.unit == "transitions" else lengths > 0).sum(axis=1)
                yield from ((_Part(ref.iteration, (ref.step,), b), int(count)) for b, count in enumerate(counts))
            return
        for i in dict.fromkeys(ref.iteration for ref in refs):
            inner_steps = tuple(ref.step for ref in refs if ref.iteration == i)
            for b in range(min(len(self._run.lengths(StageRef(i, self._stage, k))) for k in inner_steps)):
                yield _Part(i, inner_steps, b), 1

    def _items(self, part: _Part, offsets: Array) -> dict[str, Array]:
        """Return the items of a part at the given offsets, stacked."""
        of_part = self._load(part)
        constant = {"iteration": np.array(part.iteration), "task": np.array(part.task)}
        constant |= {name: of_part[name] for name in ("task_params", "task_id") if name in of_part}
        repeated = {name: np.broadcast_to(value, (len(offsets), *value.shape)) for name, value in constant.items()}
        found = {name: values for name, values in of_part.items() if name not in constant}
        if self.unit == "trials":
            return {**{name: values[None][offsets] for name, values in found.items()}, **repeated}
        real = np.flatnonzero(found["lengths"])
        if self.unit == "episodes":
            items = {"length" if n == "lengths" else n: values[real[offsets]] for n, values in found.items()}
            return {**items, **repeated}
        starts = np.cumsum(found["lengths"]) - found["lengths"]
        e = real[np.searchsorted(starts[real], offsets, side="right") - 1]
        return {**_transitions(found, e, offsets - starts[e]), **repeated}

    def _load(self, part: _Part) -> dict[str, Array]:
        """Return a task's episodes, concatenated over inner steps, from the cache or the run."""
        if part not in self._cache:
            self._cache[part] = self._read(part)
            if len(self._cache) > _CACHED_PARTS:
                self._cache.popitem(last=False)
        self._cache.move_to_end(part)
        return self._cache[part]

    def _read(self, part: _Part) -> dict[str, Array]:
        files = self._run.files
        refs = [StageRef(part.iteration, self._stage, k) for k in part.steps]
        read = [
            files.read_arrays(self._run.record(ref), _ARRAYS, [part.task])[files.stages.group_of(ref)] for ref in refs
        ]
        found = {name: np.concatenate([arrays[name][0][0] for arrays in read]) for name in _ARRAYS}
        sizes = [len(arrays["lengths"][0][0]) for arrays in read]
        found["step"] = np.repeat(np.array(part.steps), sizes)
        found["episode"] = np.concatenate([np.arange(size) for size in sizes])
        tasks = files.stages.in_group("tasks", part.iteration)
        if tasks is not None:
            about = self._run[part.iteration].tasks(task=part.task)
            found |= {"task_params": about.params[0], "task_id": about.ids[0]}
        return found


def _transitions(found: dict[str, Array], e: Array, t: Array) -> dict[str, Array]:
    ends = t == found["lengths"][e] - 1
    return {
        "observation": found["observations"][e, t],
        "action": found["actions"][e, t],
        "reward": found["rewards"][e, t],
        "next_observation": found["observations"][e, t + 1],
        "terminated": found["terminated"][e] & ends,
        "truncated": found["truncated"][e] & ends,
        "step": found["step"][e],
        "episode": found["episode"][e],
        "t": t,
    }


class PartSampler(Sampler[int]):
    """Sampler of dataset indices. Seed and epoch determine the order, in which a process reads each part only once."""

    def __init__(self, ends: Array, seed: int, pool: int) -> None:
        if not 1 <= pool <= _CACHED_PARTS:
            raise UsageError(f"pool must be between 1 and {_CACHED_PARTS}, the number of cached parts, got {pool}")
        self._ends, self._seed, self._pool = ends, seed, pool
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which determines the order."""
        self.epoch: int = epoch

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __iter__(self) -> Iterator[int]:
        rng = np.random.default_rng([self._seed, self.epoch])
        parts = rng.permutation(len(self._ends) - 1)
        for start in range(0, len(parts), self._pool):
            pooled = [np.arange(*map(int, self._ends[n : n + 2])) for n in parts[start : start + self._pool]]
            yield from rng.permutation(np.concatenate(pooled)).tolist()

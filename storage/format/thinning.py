"""Markers of thinned iterations, with which readers distinguish thinning from damage.

Rollouts, samples and adapted parameters make up most of an on-policy run and can be recomputed from what is kept:
learners, tasks, seeds and records. In off-policy runs, rollouts are the replay buffer and are kept; minibatches and
adapted parameters are removed. A marker in `_thinned` lists the records whose arrays may be missing. It is published
before the first file is removed, and deleted after the last one is restored.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metaloom.pipeline.dataflow.refs import StageRef
from metaloom.storage.errors import StageThinned, damaged
from metaloom.storage.format.files import read_sealed, render, sealed
from metaloom.storage.format.places import argument
from metaloom.storage.format.records import SCHEMA, StageRecord, StoredFile
from metaloom.storage.format.segments import segment_name
from metaloom.storage.format.stages import StageTable

FOLDER = "_thinned"

_MARKER_NAME = re.compile(r"([0-9]{8})\.json")
_PACKED_NAME = re.compile(r"[0-9]{8}-[0-9]{8}\.json")


@dataclass(frozen=True)
class Retention:
    """Rule that determines which complete iterations keep all their arrays, and a run's size limit.

    An iteration is kept if it is among the `keep_last` newest, a multiple of `keep_every`, or in `kept`. Without
    `keep_last` and `keep_every`, all are kept. The writer stops before the run's files exceed `max_bytes`.
    """

    keep_last: int | None = None
    keep_every: int | None = None
    max_bytes: int | None = None
    kept: frozenset[int] = frozenset()

    @property
    def thins(self) -> bool:
        """True if any iteration is ever thinned."""
        return self.keep_last is not None or self.keep_every is not None

    def keeps(self, iteration: int, complete: int) -> bool:
        """Return True if an iteration is kept when `complete` iterations are complete."""
        newest = self.keep_last is not None and iteration >= complete - self.keep_last
        chosen = self.keep_every is not None and iteration % self.keep_every == 0
        return not self.thins or newest or chosen or iteration in self.kept


KEEP_ALL = Retention()


@dataclass(frozen=True)
class Thinned:
    """Summary of a planned or completed thinning. Files shared with a fork count as removed but stay on disk."""

    iterations: tuple[int, ...]
    files: int
    num_bytes: int

    @classmethod
    def of(cls, records: Sequence[StageRecord], goes: Callable[[StageRecord, StoredFile], object]) -> "Thinned":
        """Summarize the removal of some records' arrays, counting the files for which `goes` is true."""
        sizes = [chunk.size for record in records for chunk in record.chunks if goes(record, chunk)]
        return cls(tuple(sorted({record.ref.iteration for record in records})), len(sizes), sum(sizes))

    @classmethod
    def sum(cls, parts: Iterable["Thinned"]) -> "Thinned":
        parts = [*parts]
        iterations = sorted({i for part in parts for i in part.iterations})
        return cls(tuple(iterations), sum(part.files for part in parts), sum(part.num_bytes for part in parts))


def marker_path(root: Path, iteration: int) -> Path:
    return root / FOLDER / f"{iteration:08d}.json"


def packed_marker_path(root: Path, iterations: range) -> Path:
    return root / FOLDER / f"{segment_name(iterations)}.json"


def is_marker(name: str) -> bool:
    return _MARKER_NAME.fullmatch(name) is not None or _PACKED_NAME.fullmatch(name) is not None


def marked_iteration(name: str) -> int | None:
    match = _MARKER_NAME.fullmatch(name)
    return int(match[1]) if match else None


def render_marker(iteration: int, outputs: Mapping[StageRef, str]) -> bytes:
    """Serialize an iteration's marker, which contains the record hash of each thinned output."""
    return render(sealed({"schema": SCHEMA, "iteration": iteration, "outputs": _entries(outputs)}))


def render_packed_marker(iterations: range, outputs: Mapping[int, Mapping[StageRef, str]]) -> bytes:
    """Serialize a segment's marker, which is equivalent to one marker per iteration."""
    by_iteration = [{"iteration": i, "outputs": _entries(outputs[i])} for i in sorted(outputs) if outputs[i]]
    about = {"schema": SCHEMA, "iterations": [iterations.start, iterations.stop], "thinned": by_iteration}
    return render(sealed(about))


def _entries(outputs: Mapping[StageRef, str]) -> list[dict[str, Any]]:
    return [
        {"stage": ref.stage, "step": ref.step, "record": outputs[ref]}
        for ref in sorted(outputs, key=lambda ref: (ref.step, ref.stage))
    ]


def read_marker(path: Path, stages: StageTable) -> dict[StageRef, str]:
    """Read the thinned outputs and their record hashes from a marker. Raises FileNotFoundError or DamagedRun."""
    document = read_sealed(path)
    try:
        iteration = marked_iteration(path.name)
        if document["schema"] != SCHEMA or iteration is None or document["iteration"] != iteration:
            raise ValueError(f"unexpected schema {document['schema']!r} or iteration {document['iteration']!r}")
        return _outputs(document["outputs"], iteration, stages)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise damaged(path, f"not the marker of a thinned iteration ({type(error).__name__}: {error})") from None


def read_packed_marker(path: Path, iterations: range, stages: StageTable) -> dict[int, dict[StageRef, str]]:
    """Read a segment's marker, keyed by iteration. Raises the same errors as `read_marker`."""
    document = read_sealed(path)
    try:
        if document["schema"] != SCHEMA or document["iterations"] != [iterations.start, iterations.stop]:
            raise ValueError(f"unexpected schema {document['schema']!r} or iterations {document['iterations']!r}")
        found = {int(item["iteration"]): item["outputs"] for item in document["thinned"]}
        if any(i not in iterations for i in found):
            raise ValueError("it describes other iterations")
        return {i: _outputs(entries, i, stages) for i, entries in found.items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise damaged(path, f"not a marker of thinned iterations ({type(error).__name__}: {error})") from None


def thinnable(refs: Iterable[StageRef], iterations: Collection[int], stages: StageTable) -> list[StageRef]:
    """Return the references among `refs` whose arrays thinning may remove, restricted to some iterations."""
    return stages.sort(ref for ref in refs if ref.iteration in iterations and stages.thinnable(ref))


def thinned_error(root: Path, ref: StageRef) -> StageThinned:
    return StageThinned(
        root,
        found=f"{ref} was thinned: its record is stored, but its arrays are not",
        required="an output that is stored in full",
        action=f"`metaloom replay {argument(root)}@{ref.iteration} --materialise` recomputes it and stores it if "
        "the digest is unchanged",
    )


def _outputs(entries: Iterable[Mapping[str, Any]], iteration: int, stages: StageTable) -> dict[StageRef, str]:
    outputs = {StageRef(iteration, str(e["stage"]), int(e["step"])): str(e["record"]) for e in entries}
    if wrong := [str(ref) for ref in outputs if not stages.recomputable(ref)]:
        raise ValueError(f"{', '.join(wrong)} cannot be thinned")
    return outputs

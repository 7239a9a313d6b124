"""Verification of runs, which finds damaged, missing and unexpected files."""

import errno
import os
import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from metaloom.pipeline.dataflow.refs import StageRef
from metaloom.pipeline.types import EpisodeBatch
from metaloom.storage.errors import IncompatibleFormat, NotARun, RunNotFound, StageThinned, StoreError, system_errors
from metaloom.storage.format.arrays import read_metadata
from metaloom.storage.format.codec import array_digests, differing, output_digest
from metaloom.storage.format.files import read_sealed
from metaloom.storage.format.places import folder_of
from metaloom.storage.format.records import SpanInput, StageRecord
from metaloom.storage.format.segments import FOLDER as SEGMENTS
from metaloom.storage.format.segments import SEAL, Link, segment_iterations
from metaloom.storage.format.sessions import (
    ABOUT,
    CLAIM_NAME,
    INFO_COPY,
    PART_NAME,
    SessionFacts,
    SessionName,
    newest_session,
    session_facts,
    stray_sessions,
)
from metaloom.storage.format.stages import EARLIER, ON_POLICY, StageTable
from metaloom.storage.format.thinning import FOLDER as THINNED
from metaloom.storage.format.thinning import is_marker, marker_path
from metaloom.storage.progress import Progress, unseen
from metaloom.storage.read.committed import TABLES, CommittedFiles
from metaloom.storage.read.history import (
    SpanSums,
    chain_problems,
    describe_missing,
    head_problems,
    missing_positions,
    sealed_links,
)
from metaloom.storage.read.info import boundaries, first_session, read_info
from metaloom.storage.read.segments import Segment, chunk_row
from metaloom.storage.remote.log import RemoteLog, follow

_LOCK_NAME = re.compile(r"writer\.lock(\.[0-9a-f]{16})?")
_TABLE_NAME = re.compile(r"[0-9]{8}\.parquet")
_UNREADABLE = os.strerror(errno.EACCES)
_FOREIGN, _LINK = "does not belong to the run", "a symbolic link; a run consists of files"


@dataclass(frozen=True)
class Damage:
    """Damaged file of a run, with the output that it belongs to, unless it belongs to the whole run."""

    file: str  # relative to the run's folder
    iteration: int | None
    stage: str | None
    step: int | None
    array: str | None  # path of a stored array, or the name of an array in a value
    problem: str

    @property
    def is_foreign(self) -> bool:
        """True for files that do not belong to the run, which repairs leave in place."""
        return self.problem in (_FOREIGN, _LINK)

    @property
    def is_unreadable(self) -> bool:
        """True for files without read permission, whose state is unknown."""
        return self.problem == _UNREADABLE

    @property
    def is_link(self) -> bool:
        """True if the file is, or was replaced by, a symbolic link."""
        return self.problem.startswith("a symbolic link")

    def __str__(self) -> str:
        parts = ("" if self.stage is None else f"iteration {self.iteration} {self.stage} step {self.step}", self.array)
        about = ", ".join(part for part in parts if part)
        return f"{self.file}{f' ({about})' if about else ''}: {self.problem}"


def verify_run(path: str | Path, progress: Progress = unseen) -> list[Damage]:
    """Return all damage to a run: an empty list if every byte is as committed.

    Leftovers of an interrupted writer, which the next one removes, are not damage. `progress` receives the number of
    outputs checked and the total. Raises RunNotFound, NotARun or IncompatibleFormat if there is no readable run at the
    path.
    """
    folder = folder_of(path)
    verification = _Verification(folder, follow(folder), progress)
    verification.run()
    return sorted(verification.found, key=lambda d: (-1 if d.iteration is None else d.iteration, d.stage or "", d.file))


class _Verification:
    def __init__(self, root: Path, remote: RemoteLog | None, progress: Progress) -> None:
        self.root = root
        self.remote = remote
        self.progress = progress
        self.found: list[Damage] = []
        self.checked = self.total = 0
        self.files = CommittedFiles(root, ON_POLICY, remote)
        self.records: dict[StageRef, StageRecord] = {}
        self.unreadable: set[StageRef] = set()
        self.thinned: dict[StageRef, str] = {}
        self.steps: dict[StageRef, int] = {}
        self.segments: dict[str, Segment] = {}
        self.sums: SpanSums | None = None
        self.spans: list[tuple[StageRef, SpanInput]] = []
        self.uncounted: set[StageRef] = set()
        self.reported: set[str] = set()
        self.segment_damage: set[tuple[Path | str, str]] = set()

    def run(self) -> None:
        info = self._info()
        self.files = CommittedFiles(self.root, self._stages(info), self.remote)
        # Read before listing records, since a writer may add some in the meantime.
        known = newest_session(self.root, first_session(info) if info else 0)
        self._read_seals()
        self._read_records()
        self._objects()
        lost = self._sessions(info)
        self._history(info, lost, known)
        self._metadata()
        for iteration in self.files.live_markers():
            with self._reporting(marker_path(self.root, iteration)):
                self.thinned |= self.files.thinned(iteration)
        packed = self.files.segments.all()
        has_spans = any(record.spans for record in self.records.values())
        with suppress(StoreError, OSError):  # reported with its segment
            has_spans = has_spans or any(record.spans for segment in packed[-1:] for record in segment.records())
        if has_spans:
            self.sums = SpanSums(lambda ref: self.steps.get(ref, 0))
        self.total = len(self.records) + sum(1 for segment in packed for _ in segment.seal.refs())
        for segment in packed:
            self._segment(segment)
        for record in self.records.values():
            self._check_record(record, self.thinned.get(record.ref) == record.sha256)
        self._spans()
        self._foreign()

    def _report(self, file: Path | str, problem: str, ref: StageRef | None = None, array: str | None = None) -> None:
        relative = file if isinstance(file, str) else file.relative_to(self.root).as_posix()
        output = (None, None, None) if ref is None else (ref.iteration, ref.stage, ref.step)
        self.found.append(Damage(relative, *output, array, problem))

    @contextmanager
    def _reporting(self, file: Path | str, ref: StageRef | None = None, array: str | None = None) -> Generator[None]:
        """Within the block, report errors as damage to a file."""
        try:
            yield
        except (StoreError, OSError) as error:
            self._report(file, _problem(error), ref, array)

    def _info(self) -> dict[str, Any] | None:
        action = "Check its permissions and its disk"
        with system_errors(self.root, required="a folder that can be read", action=action):
            os.scandir(self.root).close() if self.root.is_dir() else None
        try:
            return read_info(self.root)
        except (IncompatibleFormat, RunNotFound):
            raise
        except StoreError as error:
            if isinstance(error, NotARun) and not (self.root / "_commits").is_dir():
                raise
            # A run that lost its run.json is damaged.
            self._report(self.root / "run.json", error.found)
            return None

    def _stages(self, info: Mapping[str, Any] | None) -> StageTable:
        """Return the run's stages. If run.json is damaged, infer them from the names of the records."""
        if info is not None:
            return StageTable.of(info)
        names = os.listdir(self.root / "_commits") if (self.root / "_commits").is_dir() else []
        found = {ref.stage for name in names if (ref := StageRef.from_file_name(name)) is not None}
        return next((table for table in EARLIER.values() if table.last in found), ON_POLICY)

    def _names(self, folder: str) -> list[str]:
        with self._reporting(folder):
            return os.listdir(self.root / folder)
        return []

    def _read_seals(self) -> None:
        """Read the segments' seals. Segments with damaged seals are skipped, so their outputs are reported missing."""
        for name in self.files.segments.names():
            with self._reporting(self.root / SEGMENTS / name / SEAL):
                self.segments[name] = self.files.segments.open(name)
        for problem in self.files.segments.use(self.segments.values()):
            self._report(*problem)

    def _segment(self, segment: Segment) -> None:
        """Check a segment without keeping its records, so that memory use does not grow with the run."""
        for name in segment.seal.files:
            try:
                segment.check(name)
            except (StoreError, OSError) as error:
                self.segment_damage.add((segment.folder / name, _problem(error)))
                if (segment.folder / name).relative_to(self.root).as_posix() not in self.reported:
                    self._report(segment.folder / name, _problem(error))
        try:
            thinned, links = self.files.thinned_in(segment.iterations), list[Link]()
            for record in segment.records():
                links.append(Link.of(record))
                self._check_record(record, thinned.get(record.ref) == record.sha256)
            segment.check_links(links)
        except (StoreError, OSError) as error:  # reported above
            self.unreadable.update(segment.seal.refs())
            where = Path(getattr(error, "where", segment.folder))
            if str(getattr(error, "where", "")) not in self.reported:
                self._report(where if where.is_relative_to(self.root) else segment.folder, _problem(error))
        segment.forget()

    def _check_record(self, record: StageRecord, thinned: bool) -> None:
        self.progress(self.checked, self.total)
        self.checked += 1
        file = self.files.record_place(record.ref)
        for item in record.inputs:
            found = self._digest_of(item.ref)
            if found is None and item.ref not in self.unreadable:
                self._report(file, f"its input {item.ref} is not stored", record.ref)
            elif found not in (None, item.digest):
                self._report(file, f"was computed from another {item.ref} than the one stored", record.ref)
        if not thinned:
            self._output(record)
        if self.sums is None:
            return
        self.sums.add(record.ref, record.digest)
        self.spans += [(record.ref, item) for item in record.spans]
        if "lengths" in record.arrays and record.ref not in self.steps:
            self.uncounted.add(record.ref)

    def _read_records(self) -> None:
        refs = (ref for name in self._names("_commits") if (ref := StageRef.from_file_name(name)) is not None)
        for ref in self.files.stages.sort(ref for ref in refs if ref.stage in self.files.stages):
            if self.files.segments.holding(ref):  # left by an interrupted packing; the next session removes it
                continue
            with self._reporting(self.files.record_path(ref), ref):
                self.records[ref] = self.files.record(ref)
            if ref not in self.records:
                self.unreadable.add(ref)

    def _objects(self) -> None:
        """Report problems with the cached files of a run in object storage."""
        if self.remote is None:
            return
        owners = {chunk.path: (r.ref, chunk.array) for r in self.records.values() for chunk in (*r.chunks, *r.tables)}
        for path, problem in self.remote.problems():
            ref, array = owners.get(path, (None, None))
            file = self.remote.files.get(path)
            self.reported |= {path, *([f"{self.remote.objects.url}/{file.key}"] if file is not None else [])}
            self._report(path, problem, ref, array or None)

    def _sessions(self, info: Mapping[str, Any] | None) -> set[int]:
        """Check session files; return the positions of records known to be lost."""
        lost: set[int] = set()
        needed = {(record.session, record.token) for record in self.records.values()}
        needed.update(*(segment.seal.sessions for segment in self.segments.values()))
        names = self._names("_sessions")
        for name, _ in stray_sessions(self.root / "_sessions", names):
            self._report(self.root / "_sessions" / name, _FOREIGN)
        for name in names:
            parsed = SessionName.parse(name)
            file = self.root / "_sessions" / name / "session.json"
            if parsed is None:
                continue
            copy = file.with_name(INFO_COPY)
            with self._reporting(copy), suppress(FileNotFoundError):  # only some sessions have one
                if read_sealed(copy, indented=True) != info and info is not None:
                    self._report(copy, "not a copy of run.json")
            session = (parsed.number, parsed.token)
            if session not in needed and not file.exists():
                continue
            needed.discard(session)
            with self._reporting(file):
                lost |= session_facts(file.parent).lost
        for _, token in sorted(needed):
            self._report(self.root / "_sessions", f"the session {token}, which published records, is missing")
        return lost

    def _history(self, info: Mapping[str, Any] | None, lost: set[int], known: SessionFacts | None) -> None:
        links = sealed_links(self.segments.values(), self.records.values())
        breaks = chain_problems(self.files, links, boundaries(info) if info else {})
        for error in (*breaks, *head_problems(self.files, links, known)):
            where = Path(error.where)
            self._report(where, error.found, StageRef.from_file_name(where.name))
        end = max(links[-1].head.sequence if links else 0, known.known if known else 0)
        with self._reporting(self.root / "_commits"):
            missing = missing_positions(self.root, links, end)
            gaps = [sequence for sequence in missing if sequence not in lost]
            if len(gaps) > len(self.unreadable):
                self._report(self.root / "_commits", describe_missing(gaps, known))

    def _metadata(self) -> None:
        arrays = {chunk.array for record in self.records.values() for chunk in record.chunks}
        arrays.update(*(segment.seal.arrays for segment in self.segments.values()))
        groups = {array.partition("/")[0] for array in arrays} | {""}
        for group in groups:
            file = self.files.data / group / "zarr.json"
            with self._reporting(file):
                if read_metadata(file).get("node_type") != "group":
                    self._report(file, "does not describe a group")
        for array in arrays:
            with self._reporting(self.files.data / array / "zarr.json", array=array):
                self.files.spec(array)

    def _digest_of(self, ref: StageRef) -> str | None:
        if ref in self.records:
            return self.records[ref].digest
        if ref in self.unreadable:
            return None
        segment = self.files.segments.holding(ref)
        try:
            return segment and self.files.segments.digest(ref, segment)
        except (StoreError, OSError):  # reported with its segment
            self.unreadable.add(ref)
            return None

    def _spans(self) -> None:
        """Check the spans among the records' inputs, once all outputs have been read."""
        sums = self.sums or SpanSums(lambda ref: 0)
        # Outputs whose steps were not counted are thinned, or damaged and already reported.
        for ref, item in self.spans:
            if any(unreadable in item.span for unreadable in self.unreadable):
                continue
            found = sums.of(item.span)
            if found is not None and any(uncounted in item.span for uncounted in self.uncounted):
                found = replace(found, steps=item.steps)
            if found != item:
                problem = f"was computed from {_summary(item)}, but the run stores {_summary(found)}"
                self._report(self.files.record_place(ref), problem, ref)

    def _output(self, record: StageRecord) -> None:
        arrays: dict[str, dict[str, Any]] = {}
        whole = True
        for chunk in record.chunks:
            group, _, name = chunk.array.partition("/")
            try:
                arrays.setdefault(group, {})[name] = self.files.read_row(record, chunk)
            except StageThinned:  # thinned since the markers were read
                return
            except (StoreError, OSError, ValueError, RuntimeError) as error:
                whole = False
                # Report metadata and objects only once.
                said = str(getattr(error, "where", ""))
                if not said.endswith("zarr.json") and not {said, chunk.path} & self.reported:
                    where = Path(said or chunk.path)
                    file = where if where.is_relative_to(self.root / SEGMENTS) else chunk.path
                    if (file, _problem(error)) not in self.segment_damage:  # a file shared by all iterations
                        self._report(file, _problem(error), record.ref, chunk.array)
        for table in () if self.files.segments.holding(record.ref) else record.tables:
            known = table.path in self.reported
            with suppress(StoreError, OSError) if known else self._reporting(table.path, record.ref):
                self.files.read_bytes(record, table)
        if not whole:
            return
        file = self.files.record_place(record.ref)
        with self._reporting(file, record.ref):
            value = self.files.decode(record, arrays)
            if isinstance(value, EpisodeBatch):
                self.steps[record.ref] = value.num_steps
            for name in differing(record.arrays, array_digests(value)):
                self._report(file, "the stored array does not have the recorded digest", record.ref, name)
            if output_digest({name: entry.sha256 for name, entry in record.arrays.items()}) != record.digest:
                self._report(file, "its digest does not match its arrays", record.ref)

    def _foreign(self) -> None:
        committed = {file.path for r in self.records.values() for file in (*r.chunks, *r.tables)}
        root = os.fspath(self.root)
        for folder, folders, names in os.walk(root):
            links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
            inside = folder[len(root) :].strip("/")
            for name in (*names, *links):
                relative = f"{inside}/{name}" if inside else name
                if os.path.islink(os.path.join(folder, name)):
                    self._report(relative, _LINK)
                    continue
                match relative.split("/", 2):
                    case [top, segment, file] if top == SEGMENTS and segment_iterations(segment):
                        known = segment not in self.segments or self.segments[segment].has_place_for(file)
                    case _:
                        known = may_belong(relative, self.files.stages)
                if relative not in committed and not known:
                    self._report(relative, _FOREIGN)


def _summary(item: SpanInput | None) -> str:
    if item is None:
        return "none of these outputs"
    return f"{item.outputs} outputs {item.span} with {item.steps} steps and the digest {item.digest[:12]}"


def _problem(error: Exception) -> str:
    if isinstance(error, StoreError):
        return error.found
    if isinstance(error, PermissionError):
        return _UNREADABLE
    return "missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {error}"


def may_belong(relative: str, stages: StageTable | None) -> bool:
    """Return True if a path is valid for a file that no record commits, such as metadata or a writer's leftovers.

    Without `stages`, records of any stage are allowed.
    """
    match relative.split("/"):
        case (
            ["run.json"] | ["data.zarr", "zarr.json"] | ["data.zarr", _, "zarr.json"] | ["data.zarr", _, _, "zarr.json"]
        ):
            return True
        case ["_quarantine" | "_operator", *_]:
            return True
        case [name]:
            return _LOCK_NAME.fullmatch(name) is not None
        case ["_commits", name]:
            ref = StageRef.from_file_name(name)
            return ref is not None and (stages is None or ref.stage in stages)
        case [folder, name] if folder == THINNED:
            return is_marker(name)
        case ["_sessions", session, part, _, *_]:
            return PART_NAME.fullmatch(part) is not None and SessionName.parse(session) is not None
        case ["_sessions", claim]:
            return CLAIM_NAME.fullmatch(claim) is not None
        case ["_sessions", session, name]:
            known = name in (ABOUT, INFO_COPY) or PART_NAME.fullmatch(name) is not None
            return known and SessionName.parse(session) is not None
        case ["data.zarr", _, _, name]:
            return chunk_row(name) is not None
        case ["tables", table, name]:
            return table in TABLES and _TABLE_NAME.fullmatch(name) is not None
        case _:
            return False

"""Repair of runs: damaged outputs are removed and later recomputed; files that follow from others are rewritten.

How each kind of damaged file is restored:

| file | from |
| --- | --- |
| run.json | the copy in the folder of the session that wrote it |
| metadata of a group | its name; the root's capacity from array metadata or the configuration |
| metadata of an array | one output is removed, and recomputing it rewrites the metadata |
| record, chunk, table | the output is removed and recomputed |
| marker of a thinned iteration | the iteration is recomputed |
| session | its records, except for its start time and lost records that only it knew |
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from metaloom.pipeline.dataflow.refs import StageRef
from metaloom.storage.errors import DamagedRun, StoreError, damaged
from metaloom.storage.format.arrays import group_document, read_metadata
from metaloom.storage.format.files import make_folder, make_folders, read_file, read_sealed, render, sealed
from metaloom.storage.format.records import SCHEMA, StageRecord
from metaloom.storage.format.segments import spec_in_segment
from metaloom.storage.format.sessions import (
    ABOUT,
    FOLDER,
    INFO_COPY,
    SessionName,
    newest_session,
    session_facts,
    sessions_in,
)
from metaloom.storage.format.stages import LEARNER, plan_of
from metaloom.storage.format.thinning import marker_path
from metaloom.storage.read.committed import CommittedFiles
from metaloom.storage.read.history import describe_missing, missing_positions, sealed_links
from metaloom.storage.read.info import first_session
from metaloom.storage.read.segments import Segment
from metaloom.storage.write.sessions import Session


def info_copies(root: Path) -> list[Path]:
    return sorted(root.glob(f"{FOLDER}/*/{INFO_COPY}"))


def sound_copy(root: Path) -> bytes | None:
    """Return the content of an intact copy of run.json, or None. All intact copies are the same."""
    for copy in info_copies(root):
        with suppress(DamagedRun):
            return render(read_sealed(copy, indented=True), indented=True)
    return None


def restore_info(session: Session) -> list[str]:
    """Restore run.json from a copy if it is damaged or missing; return a line per repair."""
    path = session.root / "run.json"
    try:
        read_sealed(path, indented=True)
    except (FileNotFoundError, DamagedRun):
        raw = sound_copy(session.root)
        assert raw is not None, "a session begins only if there is an intact copy"
        _put(session, path, raw)
        return ["run.json: restored from its copy"]
    return []


class Repair:
    """Repair of a run within a session. Methods yield a line per repaired or removed file."""

    def __init__(self, files: CommittedFiles, session: Session, info: Mapping[str, Any]) -> None:
        self._files = files
        self._session = session
        self._info = info
        self._records: dict[StageRef, StageRecord] = {}
        self._thinned: dict[StageRef, str] = {}
        self._lost: set[StageRef] = set()

    def repair_run(self) -> Iterator[str]:
        """Repair files outside of segments, removing outputs that must be recomputed."""
        yield from self._repair_copies()
        yield from self._drop_markers()
        yield from self._read_records()
        yield from self._miss_records()
        yield from self._repair_sessions()
        yield from self._drop_arrays()
        yield from self._repair_groups()
        # Remove lost outputs, and outputs that must be recomputed with them. Removing the update makes an iteration
        # incomplete, so that resuming recomputes it, for which its inputs must be stored.
        iterations = {ref.iteration for ref in self._lost}
        lost = self._lost | {self._files.stages.last_ref(iteration) for iteration in iterations}
        lost |= {r for r, record in self._records.items() if r.iteration in iterations and self._is_thinned(record)}
        self._session.remove(path for ref in lost if (path := self._files.record_path(ref)).exists())
        self._files.forget_specs()

    def _repair_copies(self) -> Iterator[str]:
        raw = read_file(self._files.root / "run.json", limit=2**30)
        for copy in info_copies(self._files.root):
            with suppress(DamagedRun):
                if read_file(copy, limit=len(raw)) == raw:
                    continue
            _put(self._session, copy, raw)
            yield f"{self._name(copy)}: rewritten"

    def repair_segments(self) -> Iterator[str]:
        """Repair the files of segments, and unpack damaged segments."""
        # Segments with intact seals are used until the others are unpacked.
        sound: list[Segment] = []
        for name in self._files.segments.names():
            with suppress(DamagedRun):
                sound.append(self._files.segments.open(name))
        self._files.segments.use(sound)
        yield from self._repair_arrays()
        # Imported here because repairing a run without segments does not need pyarrow.
        from metaloom.storage.keep.unpacking import unpack_damaged

        yield from unpack_damaged(self._files, self._session)

    def _repair_arrays(self) -> Iterator[str]:
        """Rewrite damaged array metadata from the copy in a segment."""
        for segment in self._files.segments.all():
            for array, packed in segment.seal.arrays.items():
                if self._has_metadata(array):
                    continue
                path = self._files.data / array / "zarr.json"
                rows = self._capacity({*segment.seal.arrays}) + array.startswith(f"{LEARNER}/")
                spec = spec_in_segment(segment.folder / "data.zarr" / array / "zarr.json", array, packed, rows)
                make_folders(path.parent)
                _put(self._session, path, render(spec.document(), indented=True))
                self._files.forget_specs()
                yield f"{self._name(path)}: rewritten from {segment.folder.name}"

    def _drop_markers(self) -> Iterator[str]:
        for iteration in self._files.live_markers():
            try:
                self._thinned |= self._files.thinned(iteration)
            except DamagedRun as error:
                # Its outputs are then missing and will be recomputed.
                marker = marker_path(self._files.root, iteration)
                self._session.remove([marker])
                yield f"{self._name(marker)}: {error.found}; iteration {iteration} will be recomputed"

    def _read_records(self) -> Iterator[str]:
        # Outputs in segments are intact by now.
        live = (ref for ref in self._files.live_refs() if not self._files.segments.holding(ref))
        for ref in self._files.stages.sort(live):
            try:
                self._records[ref] = record = self._files.record(ref)
                for array in {chunk.array for chunk in record.chunks}:
                    if plan_of(array, self._files.stages) is None:
                        found = f"names the array {array!r}, which is not part of a run"
                        raise damaged(self._files.record_path(ref), found)
            except DamagedRun as error:
                yield self._lose(ref, error)
                continue
            if not self._is_thinned(record):
                yield from self._check_files(record)

    def _miss_records(self) -> Iterator[str]:
        """Report missing records: inputs of other records, the newest record, and gaps in the history."""
        known = newest_session(self._files.root, first_session(self._info))
        refs = {item.ref for record in self._records.values() for item in record.inputs}
        if known is not None and known.head is not None and known.head.sequence not in known.lost:
            refs.add(known.head.ref)
        missing = {ref for ref in refs - {*self._records} - self._lost if not self._files.contains(ref)}
        for ref in self._files.stages.sort(missing):
            self._lost.add(ref)
            yield f"{self._name(self._files.record_path(ref))}: missing; {ref} will be recomputed"
        # Positions without a readable record that are not known to be lost.
        links = sealed_links(self._files.segments.all(), self._records.values())
        end = max(links[-1].head.sequence if links else 0, known.known if known else 0)
        lost = known.lost if known else ()
        gaps = [position for position in missing_positions(self._files.root, links, end) if position not in lost]
        if len(gaps) > len(self._lost):
            found = describe_missing(gaps, known)
            yield f"_commits: {found}; from now on they are recorded as lost, not reported as missing"

    def _check_files(self, record: StageRecord) -> Iterator[str]:
        for file in (*record.chunks, *record.tables):
            if not file.size or (file.array and not self._has_metadata(file.array)):
                continue
            try:
                self._files.check(record, file)
            except DamagedRun as error:
                if (self._files.root / file.path).is_dir():  # it cannot be replaced by a file
                    self._session.remove([self._files.root / file.path])
                yield self._lose(record.ref, error)

    def _repair_sessions(self) -> Iterator[str]:
        """Rewrite damaged session descriptions from the sessions' records."""
        root = self._files.root / FOLDER
        written: dict[tuple[int, str], list[StageRecord]] = {}
        for record in self._records.values():
            written.setdefault((record.session, record.token), []).append(record)
        for segment in self._files.segments.all():
            written |= {session: written.get(session, []) for session in segment.seal.sessions}
        folders = {(name.number, name.token): root / str(name) for name in sessions_in(self._files.root)}
        for number, token in sorted({*written, *folders} - {(self._session.number, self._session.token)}):
            folder = folders.get((number, token))
            problem = _session_problem(folder)
            killed = problem == "missing" and (number, token) not in written  # before it wrote anything
            if problem is None or killed:
                continue
            held = [s for s in self._files.segments.all() if (number, token) in s.seal.sessions]
            packed = [record for segment in held for record in segment.records() if record.token == token]
            records = sorted([*written.get((number, token), []), *packed], key=lambda record: record.sequence)
            if folder is None:
                folder = root / str(SessionName(number, token, closed=True))
            make_folder(folder)
            about = {"schema": SCHEMA, "token": token, "lost": [], "next_sequence": 0, "rebuilt": True}
            for first in records[:1]:
                about |= {"started": first.started, "versions": dict(first.versions), "next_sequence": first.sequence}
            _put(self._session, folder / ABOUT, render(sealed(about)))
            yield f"{self._name(folder / ABOUT)}: {problem}; rewritten from the session's {len(records)} records"

    def _drop_arrays(self) -> Iterator[str]:
        """Remove damaged array metadata and one output per array; recomputing that output rewrites the metadata."""
        for array in sorted({chunk.array for record in self._records.values() for chunk in record.chunks}):
            if self._has_metadata(array):
                continue
            path = self._files.data / array / "zarr.json"
            self._session.remove([path])
            # Choose the first output, unthinned if possible, so that it is written before the array is read.
            owners = [r for r in self._records.values() if any(chunk.array == array for chunk in r.chunks)]
            owner = min(owners, key=self._is_thinned).ref
            self._lost.add(owner)
            yield f"{self._name(path)}: will be rewritten when {owner} is recomputed"

    def _repair_groups(self) -> Iterator[str]:
        arrays = {chunk.array for record in self._records.values() for chunk in record.chunks}
        arrays.update(*(segment.seal.arrays for segment in self._files.segments.all()))
        for group in sorted({array.partition("/")[0] for array in arrays} | {""}):
            path = self._files.data / group / "zarr.json"
            try:
                if read_metadata(path).get("node_type") == "group":
                    continue
                problem = "does not describe a group"
            except (FileNotFoundError, DamagedRun) as error:
                problem = error.found if isinstance(error, StoreError) else "missing"
            make_folder(path.parent)
            document = group_document({} if group else {"capacity": self._capacity(arrays)})
            _put(self._session, path, render(document, indented=True))
            yield f"{self._name(path)}: {problem}; rewritten"

    def _capacity(self, arrays: Iterable[str]) -> int:
        known = filter(self._has_metadata, arrays)
        rows = [self._files.spec(array).rows - array.startswith(f"{LEARNER}/") for array in known]
        configured = self._info["config"].get("iterations", 1)
        ends = [segment.iterations.stop for segment in self._files.segments.all()]
        reached = max([ref.iteration + 1 for ref in self._records] + ends, default=1)
        return max([*rows, reached]) if rows else max(int(configured), reached)

    def _lose(self, ref: StageRef, error: DamagedRun) -> str:
        self._lost.add(ref)
        return f"{self._name(Path(error.where))}: {error.found}; {ref} will be recomputed"

    def _is_thinned(self, record: StageRecord) -> bool:
        return self._thinned.get(record.ref) == record.sha256

    def _has_metadata(self, array: str) -> bool:
        try:
            self._files.spec(array)
        except DamagedRun:
            return False
        return True

    def _name(self, path: Path) -> str:
        return path.relative_to(self._files.root).as_posix() if path.is_relative_to(self._files.root) else str(path)


def _put(session: Session, path: Path, raw: bytes) -> None:
    """Write a file, replacing anything at its path."""
    if path.is_dir():
        session.remove([path])
    session.put({path: (raw,)})


def _session_problem(folder: Path | None) -> str | None:
    if folder is None:
        return "missing"
    try:
        session_facts(folder)
    except FileNotFoundError:
        return "missing"
    except DamagedRun as error:
        return error.found
    return None

"""Unpacking of damaged segments, so that intact outputs can be used and the rest repaired."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from metaloom.storage.errors import DamagedRun, StoreError
from metaloom.storage.format.arrays import check_chunk, crc32c, largest_chunk
from metaloom.storage.format.files import Content, make_folder, read_file, sync_folder
from metaloom.storage.format.records import StageRecord, parse_record
from metaloom.storage.format.segments import FOLDER, RECORDS, SEAL, Link, Seal, segment_iterations
from metaloom.storage.format.thinning import marker_path, packed_marker_path, render_marker
from metaloom.storage.read.committed import TABLES, CommittedFiles
from metaloom.storage.read.parquet import open_records, parse_table, read_columns
from metaloom.storage.read.segments import LARGEST_FILE, TABLE_SCALE, Segment
from metaloom.storage.write.packed_tables import iteration_file
from metaloom.storage.write.packer import packed_arrays
from metaloom.storage.write.sessions import Session

_AT_ONCE = 256


def unpack_damaged(files: CommittedFiles, session: Session) -> Iterator[str]:
    """Unpack damaged segments, and yield a line per damaged file. Files that cannot be restored are then missing."""
    for name in files.segments.names():
        folder = files.root / FOLDER / name
        lines = [*_problems(files, folder)]
        if lines:
            _Unpacking(files, session, folder).run()
            yield from (f"{line}; the segment was unpacked" for line in lines)
    files.segments.all(refresh=True)


def _problems(files: CommittedFiles, folder: Path) -> Iterator[str]:
    try:
        segment = files.segments.open(folder.name)
    except (DamagedRun, NotADirectoryError) as error:
        yield _line(files, folder / SEAL, error)
        return
    files.segments.use([segment])  # the others may be damaged too
    unsound = False
    for name in segment.seal.files:
        try:
            segment.check(name)
        except DamagedRun as error:
            unsound = True
            yield _line(files, folder / name, error)
    if unsound:
        return
    links: list[Link] = []
    try:
        for record in segment.records():
            links.append(Link.of(record))
            if files.is_thinned(record):
                continue
            for chunk in (chunk for chunk in record.chunks if chunk.size):
                try:
                    files.check(record, chunk)
                except DamagedRun as error:
                    yield _line(files, folder, error)
        segment.check_links(links)
    except DamagedRun as error:
        yield _line(files, folder / RECORDS, error)


def _line(files: CommittedFiles, path: Path, error: Exception) -> str:
    where = Path(getattr(error, "where", path))
    where = where if where.is_relative_to(files.root) else path
    found = error.found if isinstance(error, StoreError) else "not a folder"
    return f"{where.relative_to(files.root).as_posix()}: {found}"


class _Unpacking:
    """Restoration of the files that a segment replaced, if they are intact."""

    def __init__(self, files: CommittedFiles, session: Session, folder: Path) -> None:
        iterations = segment_iterations(folder.name)
        assert iterations is not None, f"{folder} is not named like a segment"
        self._files = files
        self._session = session
        self._folder = folder
        self._iterations = iterations
        self._records: list[StageRecord] = []

    def run(self) -> None:
        if self._folder.is_dir():
            self._records = [*_sound_records(self._folder / RECORDS)]
            try:
                segment = Segment(self._folder)
            except DamagedRun:  # only the seal is damaged, and the records repeat its content
                arrays = packed_arrays(self._files, self._records)
                segment = Segment(self._folder, Seal.of(self._iterations, self._records, arrays, {}))
            self._put(self._tables())
            self._put(self._chunks(segment))
            self._put(self._markers(segment))
            self._put((self._files.record_path(record.ref), record.content()) for record in self._records)
        # From here on, the restored files are used.
        self._session.remove([self._folder])
        sync_folder(self._folder.parent)
        self._session.remove([packed_marker_path(self._files.root, self._iterations), *self._empty_markers()])

    def _put(self, contents: Iterable[tuple[Path, bytes]]) -> None:
        batch: dict[Path, Content] = {}
        for path, raw in contents:
            if not path.parent.is_dir():
                make_folder(path.parent.parent)
                make_folder(path.parent)
            if path.is_dir():
                self._session.remove([path])
            batch[path] = (raw,)
            if len(batch) == _AT_ONCE:
                self._session.put(batch)
                batch.clear()
        self._session.put(batch)

    def _chunks(self, segment: Segment) -> Iterator[tuple[Path, bytes]]:
        moved: dict[Path, Path] = {}
        for record in self._records:
            for chunk in (chunk for chunk in record.chunks if chunk.size and chunk.array in segment.seal.arrays):
                path, row = self._files.root / chunk.path, self._files.row(record.ref, chunk.array)
                if not segment.seal.arrays[chunk.array].sharded:
                    packed = segment.chunk_path(self._files.spec(chunk.array), row)
                    # There is no second copy: if it is not stored, the chunk is missing from now on.
                    if self._files.is_stored(packed):
                        moved[packed] = path
                    continue
                try:
                    spec = self._files.spec(chunk.array)
                    raw = segment.read_chunk(spec, row, limit=largest_chunk(spec))
                    check_chunk(raw, segment.chunk_path(spec, row), size=chunk.size, crc=chunk.crc32c)
                except (DamagedRun, FileNotFoundError):  # missing from now on, or thinned
                    continue
                yield path, raw
        self._session.remove([path for path in moved.values() if path.is_dir()])
        self._session.link(moved)

    def _tables(self) -> Iterator[tuple[Path, bytes]]:
        for name in TABLES:
            path = self._folder / "tables" / f"{name}.parquet"
            try:
                table = parse_table(read_file(path, limit=LARGEST_FILE), path, scale=TABLE_SCALE)
            except (DamagedRun, FileNotFoundError):
                continue
            for record in self._records:
                for file in (file for file in record.tables if file.path.split("/")[1] == name):
                    raw = iteration_file(table, record.ref.iteration)
                    if (len(raw), crc32c(raw)) == (file.size, file.crc32c):
                        yield self._files.root / file.path, raw

    def _markers(self, segment: Segment) -> Iterator[tuple[Path, bytes]]:
        try:
            packed = self._files.packed_markers(segment)
        except DamagedRun:
            return
        live = {*self._files.live_markers()}
        for iteration, outputs in packed.items():
            if iteration not in live and outputs:
                yield marker_path(self._files.root, iteration), render_marker(iteration, outputs)

    def _empty_markers(self) -> Iterator[Path]:
        """Yield the markers of restored iterations, which only override the segment's marker."""
        for iteration in self._files.live_markers():
            with suppress(DamagedRun):  # reported and removed with the other markers
                if iteration in self._iterations and not self._files.thinned(iteration):
                    yield marker_path(self._files.root, iteration)


def _sound_records(path: Path) -> Iterator[StageRecord]:
    """Yield the readable records in a file; each record is checked against its own hash."""
    try:
        parquet = open_records(read_file(path, limit=LARGEST_FILE), path)
    except (DamagedRun, FileNotFoundError):
        return
    for group in range(parquet.num_row_groups):
        try:
            (documents,) = read_columns(parquet, ["document"], path, group=group)
        except DamagedRun:
            continue
        for document in documents:
            with suppress(DamagedRun):
                yield parse_record(str(document).encode(), path)

"""Archives of reference runs: how one is made of a run, and how it becomes a run again."""

import hashlib
import io
import shutil
import struct
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any
from zipfile import ZIP_DEFLATED, ZIP_STORED, BadZipFile, ZipFile, ZipInfo

from metaloom import storage
from metaloom.flows.errors import UsageError
from metaloom.flows.references.index import INDEX, Reference, read_index, write_index
from metaloom.flows.trust import names_of_run
from metaloom.flows.views.formatting import plural
from metaloom.flows.views.run_info import planned_iterations
from metaloom.storage import Run
from metaloom.storage.errors import damaged
from metaloom.storage.format.files import read_file
from metaloom.storage.format.paths import check_run_name

_LARGEST_ARCHIVE = 2**28
_LARGEST_RUN = 2**30
_MOST_FILES = 10_000
_DEEPEST = 16
_ENTRY = b"PK\x01\x02"  # begins every entry in the table of contents of a zip
_NO_ARCHIVE = (BadZipFile, OSError, RuntimeError, ValueError, EOFError, zlib.error, struct.error)
_BEGINNING = (1980, 1, 1, 0, 0, 0)  # of time, to zip
_LEFT_OUT = ("_operator", "_quarantine", "writer.lock")


def add(path: Path, folder: Path, name: str | None = None, *, learners: int = 20) -> Reference:
    """Make a reference of a stored run, which stays as it is, and put it into a folder and its index.

    The reference is a copy of the run: without its batches, with the learner of every so many iterations and the
    newest, packed, in one archive.

    Args:
        path: the run's folder.
        folder: of the references; made if need be.
        name: of the reference; the run's by default.
        learners: iterations from one stored learner to the next; so many are computed, at most, to check one.

    Raises:
        UsageError: the run is not complete, names modules of its user or is under a URL, or there is a reference of
            this name.
        storage.DamagedRun: the run is damaged.
    """
    _require_folder(path)
    run = storage.open_run(path)
    name = check_run_name(run.name if name is None else name)
    known = read_index(folder) if (folder / INDEX).exists() else []
    if name in [reference.name for reference in known]:
        raise UsageError(f"{folder}: found a reference {name} already; required another name: --name NAME")
    if learners < 1:
        raise UsageError(f"found --learners {learners}; required 1 or more")
    _require_repeatable(run)
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="metaloom-reference-") as scratch:
        copied = Path(scratch) / name
        shutil.copytree(path, copied, ignore=shutil.ignore_patterns(*_LEFT_OUT))
        with storage.open_writer(copied) as writer:
            writer.thin(run.iterations)
            writer.thin_learners(learners)
            writer.pack()
        _require_sound(copied)
        reference = _described(storage.open_run(copied), learners, _packed(copied, folder / f"{name}.zip"))
    write_index(folder, [*known, reference])
    return reference


@contextmanager
def opened(folder: Path, reference: Reference) -> Iterator[Path]:
    """The folder of a reference as a run, for as long as the context lasts; raises as `extract`."""
    with TemporaryDirectory(prefix="metaloom-reference-") as scratch:
        yield extract(folder, reference, Path(scratch) / reference.name)


def extract(folder: Path, reference: Reference, path: Path) -> Path:
    """Make a run of a reference, at a path where there is nothing, and return it.

    Raises:
        UsageError: the place is under a URL.
        storage.RunExists: there is something.
        storage.DamagedRun: the archive is missing or is not that of the index, or holds no run that
            the index describes.
    """
    _require_folder(path)
    _require_free(path)
    archive = folder / reference.archive
    try:
        raw = read_file(archive, limit=_LARGEST_ARCHIVE)
    except FileNotFoundError:
        raise damaged(archive, "is missing") from None
    if hashlib.sha256(raw).hexdigest() != reference.sha256:
        raise damaged(archive, "is not the archive that the index names: its SHA-256 is another")
    # A folder of its own, so that two at once do not meet, beside the place, to be renamed to it.
    with TemporaryDirectory(prefix=".metaloom-reference-", dir=path.parent) as scratch:
        part = Path(scratch) / reference.name
        _unpack(raw, archive, part)
        _require_described(storage.open_run(part), reference, archive)
        try:
            part.rename(path)
        except OSError:
            _require_free(path)
            raise
    return path


def _require_free(path: Path) -> None:
    if path.exists():
        raise storage.RunExists(
            path, found="something is there already", required="a free place", action="Choose another name with --run"
        )


def _unpack(raw: bytes, archive: Path, folder: Path) -> None:
    """Unpack what was read of an archive, which somebody may have replaced since."""
    if raw.count(_ENTRY) > _MOST_FILES:
        raise damaged(archive, f"holds more than {_MOST_FILES} files, more than any reference does")
    try:
        with ZipFile(io.BytesIO(raw)) as opened_archive:
            _require_plain(archive, opened_archive)
            opened_archive.extractall(folder)
    except _NO_ARCHIVE as error:
        raise damaged(archive, f"cannot be unpacked ({type(error).__name__}: {error})") from None


def _require_folder(path: Path) -> None:
    if url := storage.url_of(path):
        raise UsageError(f"found {url}; required a run in a folder: references are copied from and to folders only")


def _require_repeatable(run: Run) -> None:
    done, planned = len(run.iterations), planned_iterations(run)
    if done < planned or not done:
        raise UsageError(
            f"{run.location}: found {done} of {plural(planned, 'iteration')}; required a complete run: "
            f"metaloom resume {run.location}"
        )
    if names := names_of_run(run):
        raise UsageError(
            f"{run.location}: found settings that name {', '.join(names)}; required a run of nothing but what Metaloom "
            "brings, since others could not compute it again"
        )


def _require_sound(path: Path) -> None:
    if damages := storage.verify_run(path):
        raise damaged(path / damages[0].file, damages[0].problem)


def _described(run: Run, learners: int, archive: Path) -> Reference:
    raw = archive.read_bytes()
    return Reference(
        name=run.name,
        **_told(run),
        learners=learners,
        wall_seconds=round(sum(run.record(ref).seconds for ref in run.refs()), 1),
        archive=archive.name,
        size=len(raw),
        sha256=hashlib.sha256(raw).hexdigest(),
    )


def _told(run: Run) -> Mapping[str, Any]:
    """What the index says of a run that the run says itself."""
    last = run.metrics([run.iterations[-1]]).drop_columns(["iteration"]).to_pylist()[0]
    return {
        "env": str(run.config["env"]["name"]),
        "algorithm": str(run.config["algorithm"]["name"]),
        "seed": int(run.config["seed"]),
        "iterations": len(run.iterations),
        "config_digest": str(run.info["config_digest"]),
        "code": str(run.info["environment"]["code"]),
        "versions": run.info["versions"],
        "metrics": {name: value for name, value in last.items() if value is not None and value == value},
    }


def _packed(folder: Path, archive: Path) -> Path:
    """Write all files of a folder into an archive, the same bytes for the same files."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "writer.lock")
    with ZipFile(archive, "w", ZIP_DEFLATED, compresslevel=9) as opened_archive:
        for path in files:
            info = ZipInfo(path.relative_to(folder).as_posix(), _BEGINNING)
            info.external_attr = 0o644 << 16
            opened_archive.writestr(info, path.read_bytes(), ZIP_DEFLATED)
    return archive


def _require_plain(archive: Path, opened_archive: ZipFile) -> None:
    """Refuse what `_packed` does not write: other names than of files within, twice the same one, more than fits."""
    entries, names = opened_archive.infolist(), opened_archive.namelist()
    for entry in entries:
        name = PurePosixPath(entry.filename)
        is_within = not name.is_absolute() and ".." not in name.parts and str(name) == entry.filename
        # Others may give gigabytes for each kilobyte, all at once.
        is_known = entry.compress_type in (ZIP_STORED, ZIP_DEFLATED)
        if not (is_within and is_known and len(name.parts) <= _DEEPEST):
            raise damaged(archive, f"holds {entry.filename[:80]!r}, which no reference does")
    if len({*names}) < len(names):
        raise damaged(archive, "holds several files of the same name")
    if (size := sum(entry.file_size for entry in entries)) > _LARGEST_RUN:
        raise damaged(archive, f"holds {size} bytes, more than any reference does")


def _require_described(run: Run, reference: Reference, archive: Path) -> None:
    """Refuse a run that is another one than the index says."""
    try:
        found = _told(run)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise damaged(archive, f"holds no complete run ({type(error).__name__}: {error})") from None
    if differing := [name for name, value in found.items() if value != getattr(reference, name)]:
        raise damaged(archive, f"holds a run of which the index says something else: {', '.join(differing)}")

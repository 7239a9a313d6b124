"""Archives of reference runs: how one is made of a run, and how it becomes a run again."""

import hashlib
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import ZIP_DEFLATED, BadZipFile, ZipFile, ZipInfo

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

LEARNERS_EVERY = 20
"""Iterations from one stored learner to the next: so many are computed, at most, to check one."""

_LARGEST_ARCHIVE = 2**28
_LARGEST_RUN = 2**30
_MOST_FILES = 10_000
_BEGINNING = (1980, 1, 1, 0, 0, 0)  # of time, to zip
_LEFT_OUT = ("_operator", "_quarantine", "writer.lock")


def add(path: Path, folder: Path, name: str | None = None, *, learners: int = LEARNERS_EVERY) -> Reference:
    """Make a reference of a stored run, which stays as it is, and put it into a folder and its index.

    The reference is a copy of the run: without its batches, with the learner of every 20th iteration and the newest,
    packed, in one archive.

    Args:
        path: the run's folder.
        folder: of the references; made if need be.
        name: of the reference; the run's by default.
        learners: iterations from one stored learner to the next.

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
        storage.DamagedRun: the archive is missing or is not that of the index, or holds no run.
    """
    _require_folder(path)
    if path.exists():
        raise storage.RunExists(
            path, found="something is there already", required="a free place", action="Choose another name with --run"
        )
    archive = folder / reference.archive
    try:
        raw = read_file(archive, limit=_LARGEST_ARCHIVE)
    except FileNotFoundError:
        raise damaged(archive, "is missing") from None
    if hashlib.sha256(raw).hexdigest() != reference.sha256:
        raise damaged(archive, "is not the archive that the index names: its SHA-256 is another")
    part = path.with_name(f".metaloom-reference-{path.name}")
    shutil.rmtree(part, ignore_errors=True)
    try:
        with ZipFile(archive) as opened_archive:
            _require_modest(archive, opened_archive.infolist())
            opened_archive.extractall(part)
    except (BadZipFile, OSError, RuntimeError, NotImplementedError) as error:
        shutil.rmtree(part, ignore_errors=True)
        raise damaged(archive, f"cannot be unpacked ({type(error).__name__}: {error})") from None
    part.rename(path)
    return path


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
    last = run.metrics([run.iterations[-1]]).drop_columns(["iteration"]).to_pylist()[0]
    return Reference(
        name=run.name,
        env=str(run.config["env"]["name"]),
        algorithm=str(run.config["algorithm"]["name"]),
        seed=int(run.config["seed"]),
        iterations=len(run.iterations),
        learners=learners,
        config_digest=str(run.info["config_digest"]),
        code=str(run.info["environment"]["code"]),
        versions=run.info["versions"],
        metrics={name: value for name, value in last.items() if value is not None and value == value},
        wall_seconds=round(sum(run.record(ref).seconds for ref in run.refs()), 1),
        archive=archive.name,
        size=len(raw),
        sha256=hashlib.sha256(raw).hexdigest(),
    )


def _packed(folder: Path, archive: Path) -> Path:
    """Write all files of a folder into an archive, the same bytes for the same files."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "writer.lock")
    with ZipFile(archive, "w", ZIP_DEFLATED, compresslevel=9) as opened_archive:
        for path in files:
            info = ZipInfo(path.relative_to(folder).as_posix(), _BEGINNING)
            info.external_attr = 0o644 << 16
            opened_archive.writestr(info, path.read_bytes(), ZIP_DEFLATED)
    return archive


def _require_modest(archive: Path, entries: Sequence[ZipInfo]) -> None:
    size = sum(entry.file_size for entry in entries)
    if len(entries) > _MOST_FILES or size > _LARGEST_RUN:
        raise damaged(archive, f"holds {len(entries)} files of {size} bytes, more than any reference does")

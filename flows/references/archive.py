"""Packing of runs into reference archives, and their extraction."""

import errno
import hashlib
import io
import os
import re
import shutil
import stat
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path, PurePosixPath
from tempfile import gettempdir
from typing import Any
from zipfile import ZIP_DEFLATED, ZIP_STORED, BadZipFile, ZipFile, ZipInfo

from metaloom import storage
from metaloom.flows.errors import UsageError
from metaloom.flows.formatting import plural
from metaloom.flows.graph.run_stages import stages_of_run
from metaloom.flows.references.index import INDEX, Reference, as_archive_damage, broken, read_index, write_index
from metaloom.flows.rollouts.workers import Backend
from metaloom.flows.trust import names_of_run, strings_in
from metaloom.flows.views.run_info import state_of
from metaloom.storage import Run, argument
from metaloom.storage.errors import damaged, system_errors
from metaloom.storage.format.files import locked, make_folders, read_file, replace_file
from metaloom.storage.format.places import check_run_name
from metaloom.storage.format.segments import FOLDER as SEGMENTS
from metaloom.storage.read.info import mapping
from metaloom.storage.read.verify import may_belong
from metaloom.storage.unfinished import unfinished_folder

_PATH = re.compile(r"/|~|\.\.?/")  # start of a local path; environment names never begin with these characters
LARGEST_ARCHIVE = 2**28
_LARGEST_RUN = 2**30
_MOST_FILES = 10_000
_DEEPEST = 16
_ENTRY = b"PK\x01\x02"  # signature of entries in a zip's central directory
_NO_ARCHIVE = (BadZipFile, OSError, RuntimeError, ValueError, EOFError, zlib.error, struct.error)
_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.EMFILE)
_BEGINNING = (1980, 1, 1, 0, 0, 0)  # the earliest time that zip can store


def require_repeatable(run: Run) -> None:
    """Raise UsageError if other people could not recompute the run."""
    done = len(run.iterations)
    if not done or state_of(run, None) != "complete":
        raise UsageError(
            f"{run.location}: {done} of {plural(run.capacity, 'iteration')} complete; finish the run first: "
            f"metaloom resume {argument(run.path)}"
        )
    infos: list[Mapping[str, Any]] = [run.info, *run.info.get("ancestors", [])]
    for info in infos:
        if start := mapping(info.get("config")).get("init_from"):
            raise UsageError(
                f"{run.location}: init_from={mapping(start).get('run')} is a run that others do not have; "
                "train a run without init_from, so that its first learner comes from its seed"
            )
    # The settings name the plug-ins of installed packages without a module.
    environments = [run.info["environment"], *(session.environment for session in run.sessions())]
    plugins = dict.fromkeys(str(name) for environment in environments for name in mapping(environment.get("plugins")))
    if names := [*names_of_run(run), *plugins]:
        raise UsageError(
            f"{run.location}: its settings name {', '.join(names)}, so others could not recompute it; use only "
            "built-in parts"
        )
    if paths := dict.fromkeys(text for info in infos for text in strings_in(info.get("config")) if _PATH.match(text)):
        raise UsageError(
            f"{run.location}: its settings name {', '.join(paths)}, a path on this machine, so others could not "
            "recompute it; use only built-in parts"
        )
    # A complete iteration may lack an output, for example an evaluation.
    with stages_of_run(run, Backend(workers=0)) as stages:
        for ref in (ref for i in run.iterations for ref in stages.order(i) if not run.contains(ref)):
            raise UsageError(
                f"{run.location}: iteration {ref.iteration} has no {ref.stage}, which the settings request; "
                f"complete the run first: metaloom resume {argument(run.path)}"
            )


def pack(folder: Path, archive: Path) -> Path:
    """Pack a folder's files into an archive with deterministic bytes, and return the archive's path."""
    with ZipFile(archive, "w", ZIP_DEFLATED, compresslevel=9) as opened_archive:
        for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "writer.lock"):
            info = ZipInfo(path.relative_to(folder).as_posix(), _BEGINNING)
            info.external_attr = 0o644 << 16
            opened_archive.writestr(info, path.read_bytes(), ZIP_DEFLATED)
    return archive


def unpack(raw: bytes, archive: Path, folder: Path) -> None:
    """Unpack an archive's bytes, which may be malicious, into a folder; raise DamagedRun if they are not acceptable."""
    if raw.count(_ENTRY) > _MOST_FILES:
        raise broken(archive, f"contains more than {_MOST_FILES} files, more than any reference does")
    try:
        with ZipFile(io.BytesIO(raw)) as opened_archive:
            _require_plain(archive, opened_archive)
            opened_archive.extractall(folder)
    except _NO_ARCHIVE as error:
        if isinstance(error, OSError) and error.errno in _OF_THE_DISK:
            raise
        raise broken(archive, f"cannot be unpacked ({type(error).__name__}: {error})") from None


def _require_plain(archive: Path, opened_archive: ZipFile) -> None:
    """Raise DamagedRun for paths outside the folder, duplicate names or excessive sizes, which `pack` never writes."""
    entries, names = opened_archive.infolist(), opened_archive.namelist()
    for entry in entries:
        name = PurePosixPath(entry.filename)
        is_within = not name.is_absolute() and ".." not in name.parts and str(name) == entry.filename
        # Other compression methods may expand a kilobyte to gigabytes.
        is_known = entry.compress_type in (ZIP_STORED, ZIP_DEFLATED)
        if not (is_within and is_known and len(name.parts) <= _DEEPEST):
            raise broken(archive, f"contains {entry.filename[:80]!r}, which no reference does")
    if len({*names}) < len(names):
        raise broken(archive, "contains several files with the same name")
    if (size := sum(entry.file_size for entry in entries)) > _LARGEST_RUN:
        raise broken(archive, f"contains {size} bytes, more than any reference does")


def add(path: Path, folder: Path, name: str | None = None, *, learners: int = 20) -> Reference:
    """Create a reference from a stored run, and add it to a folder and its index.

    The reference is an archive of a packed copy of the run. The copy contains no batches, and only the newest learner
    and the learner of every N-th iteration.
    """
    _require_folder(path)
    run = storage.open_run(path)
    name = check_run_name(run.name if name is None else name)
    _known_without(name, folder)  # before anything is copied
    require_repeatable(run)
    if gone := _thinned_learners(run, learners):
        raise UsageError(
            f"{run.location}: learner {gone[0]} was thinned, but one is needed every {plural(learners, 'iteration')}. "
            f"`metaloom replay {storage.argument(run.path)} --materialise` stores thinned learners again; "
            "or choose another interval with --learners N"
        )
    with _writing(folder), _scratch() as place:
        copied = place / name
        try:
            shutil.copytree(path, copied, ignore=partial(_left_out, path))
            with storage.open_writer(copied) as writer:
                writer.thin(writer.run.iterations)
                writer.thin_learners(learners)
                writer.pack()
            for damage in storage.verify_run(copied):
                raise damaged(copied / damage.file, damage.problem)
        except storage.DamagedRun as error:
            where = error.where.replace(str(copied), run.location)
            required = "a run whose stored files are intact, with no other files beside them"
            action = f"`metaloom verify {storage.argument(run.path)}` lists all damage"
            raise storage.DamagedRun(where, found=error.found, required=required, action=action) from None
        archive = pack(copied, place / f"{name}.zip")
        raw, facts = archive.read_bytes(), _described(storage.open_run(copied))
        digest = hashlib.sha256(raw).hexdigest()
        reference = Reference(name=name, learners=learners, **facts, archive=archive.name, size=len(raw), sha256=digest)
        make_folders(folder)
        with locked(folder):
            known = _known_without(name, folder)
            place = folder / archive.name
            if place.exists():  # written by another user, or left by an `add` that was killed
                raise UsageError(
                    f"{place} exists but is not in the index; move it away, or choose another name with --name NAME"
                )
            replace_file(place, raw, folder / f".{archive.name}.part")
            write_index(folder, [*known, reference])
    return reference


@contextmanager
def opened(folder: Path, reference: Reference) -> Iterator[Path]:
    """Within the block, extract a reference to a temporary folder and yield the path of its run.

    Raises the same errors as `extract`. Damage found in the block is reported as damage to the archive.
    """
    with _scratch() as place:
        path = extract(folder, reference, place / reference.name)
        with as_archive_damage(folder / reference.archive, path):
            yield path


def extract(folder: Path, reference: Reference, path: Path) -> Path:
    """Unpack a reference as a run at a new path, and return the path. Raise DamagedRun if the archive is damaged."""
    _require_folder(path)
    _require_free(path)
    archive = folder / reference.archive
    try:
        raw = read_file(archive, limit=LARGEST_ARCHIVE)
    except FileNotFoundError:
        raise broken(archive, "missing") from None
    if hashlib.sha256(raw).hexdigest() != reference.sha256:
        raise broken(archive, "not the archive in the index: its SHA-256 differs")
    if len(raw) != reference.size:
        raise broken(archive, f"has {len(raw)} bytes; the index records {reference.size}")
    # Unpack into a private folder beside the target and rename it, so that concurrent calls do not conflict.
    with _writing(path), unfinished_folder(path.absolute().parent, reference.name) as scratch:
        part = scratch / reference.name
        unpack(raw, archive, part)
        with as_archive_damage(archive, part):
            run = storage.open_run(part)
            try:
                found = _described(run)
            except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
                raise broken(archive, f"contains no complete run ({type(error).__name__}: {error})") from None
            differing = [name for name, value in found.items() if value != getattr(reference, name)]
            differing += ["learners"] if _thinned_learners(run, reference.learners) else []
            if differing:
                raise broken(archive, f"contains a run that differs from its index entry: {', '.join(differing)}")
        try:
            part.rename(path)
        except OSError:
            _require_free(path)
            raise
    return path


def _scratch() -> AbstractContextManager[Path]:
    return unfinished_folder(Path(gettempdir()), "metaloom-reference", 0o700)


def _writing(place: Path) -> AbstractContextManager[None]:
    """Return a context manager that converts an OSError to an error about writing to `place`."""
    needed = f"free space and permission to write {place}, and to make folders in {gettempdir()}"
    return system_errors(place, required=needed, action="Free space, or choose another path")


def _require_free(path: Path) -> None:
    if path.exists():
        raise storage.RunExists(
            path, found="the path exists already", required="a free path", action="Choose another name with --run"
        )


def _require_folder(path: Path) -> None:
    """Raise UsageError if the path stands for a URL."""
    if url := storage.url_of(path):
        raise UsageError(f"{url} is not a local folder; references can be copied only from and to local folders")


def _described(run: Run) -> Mapping[str, Any]:
    """Return the fields of the index entry that describe the run."""
    last = run.metrics([run.iterations[-1]]).drop_columns(["iteration"]).to_pylist()[0]
    return {
        "env": str(run.config["env"]["name"]),
        "algorithm": str(run.config["algorithm"]["name"]),
        "seed": int(run.config["seed"]),
        "iterations": len(run.iterations),
        "config_digest": str(run.info["config_digest"]),
        "code": str(run.info["environment"]["code"]),
        "versions": run.info["versions"],
        "wall_seconds": round(sum(run.record(ref).seconds for ref in run.refs()), 1),
        "metrics": {name: value for name, value in last.items() if value is not None and value == value},
    }


def _known_without(name: str, folder: Path) -> list[Reference]:
    """Return a folder's references; raise UsageError if any of them has this name."""
    known = read_index(folder) if (folder / INDEX).exists() else []
    if name in [reference.name for reference in known]:
        raise UsageError(f"{folder} already has a reference {name}; choose another name with --name NAME")
    return known


def _left_out(run: Path, folder: str, names: Sequence[str]) -> set[str]:
    """Return the files in a run's folder to omit. Reject foreign files, and links, whose targets would be published."""
    left_out = {"_operator", "_quarantine", "writer.lock"} & {*names}
    for name in {*names} - left_out:
        mode = os.lstat(place := Path(folder) / name).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise UsageError(f"{place} is neither a file nor a folder, so it does not belong to the run; move it away")
        relative = place.relative_to(run).as_posix()
        # Files in segments are checked in the copy.
        if stat.S_ISREG(mode) and not (relative.startswith(f"{SEGMENTS}/") or may_belong(relative, None)):
            raise damaged(place, "does not belong to the run")
    return left_out


def _thinned_learners(run: Run, every: int) -> list[int]:
    """Return the iterations whose initial learner is thinned, although a reference requires it."""
    return [i for i in run.iterations if not i % every and run.is_thinned(run.learner_ref(i))]

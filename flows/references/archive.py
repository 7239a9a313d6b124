"""Archives of reference runs: how one is made of a run, and how it becomes a run again."""

import hashlib
import os
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from metaloom import storage
from metaloom.flows.errors import UsageError
from metaloom.flows.formatting import plural
from metaloom.flows.references.index import INDEX, Reference, read_index, write_index
from metaloom.flows.references.remedies import broken, told_of_archive
from metaloom.flows.references.repeatable import require_repeatable
from metaloom.flows.references.zips import LARGEST_ARCHIVE, pack, unpack
from metaloom.storage import Run
from metaloom.storage.errors import damaged, system_errors
from metaloom.storage.format.files import lock, make_folders, read_file, replace_file
from metaloom.storage.format.places import check_run_name
from metaloom.storage.unfinished import unfinished_folder

_LEFT_OUT = ("_operator", "_quarantine", "writer.lock")


def add(path: Path, folder: Path, name: str | None = None, *, learners: int = 20) -> Reference:
    """Make a reference of a stored run, which stays as it is, and put it into a folder and its index.

    The reference is a copy of the run: without its batches, with the learner of every N-th iteration and the
    newest, packed, in one archive.
    """
    _require_folder(path)
    run = storage.open_run(path)
    name = check_run_name(run.name if name is None else name)
    _known_without(name, folder)  # before anything is copied
    if learners < 1:
        raise UsageError(f"found --learners {learners}; required 1 or more")
    require_repeatable(run)
    _require_learners(run, learners)
    with _writing(folder), _scratch() as place:
        copied = place / name
        shutil.copytree(path, copied, ignore=_left_out)
        with _told_of(run, copied):
            with storage.open_writer(copied) as writer:
                writer.thin(writer.run.iterations)
                writer.thin_learners(learners)
                writer.pack()
            for damage in storage.verify_run(copied):
                raise damaged(copied / damage.file, damage.problem)
        archive = pack(copied, place / f"{name}.zip")
        raw, told = archive.read_bytes(), _told(storage.open_run(copied))
        digest = hashlib.sha256(raw).hexdigest()
        reference = Reference(name=name, learners=learners, **told, archive=archive.name, size=len(raw), sha256=digest)
        make_folders(folder)
        with _held(folder):
            known = _known_without(name, folder)
            _put(archive, folder)
            write_index(folder, [*known, reference])
    return reference


@contextmanager
def opened(folder: Path, reference: Reference) -> Iterator[Path]:
    """Open the folder of a reference as a run while the context lasts; raises as `extract`.

    Damage found within the context is reported for the archive.
    """
    with _scratch() as place:
        path = extract(folder, reference, place / reference.name)
        with told_of_archive(folder / reference.archive, path):
            yield path


def extract(folder: Path, reference: Reference, path: Path) -> Path:
    """Unpack a reference as a run to a free path, and return the path."""
    _require_folder(path)
    _require_free(path)
    archive = folder / reference.archive
    try:
        raw = read_file(archive, limit=LARGEST_ARCHIVE)
    except FileNotFoundError:
        raise broken(archive, "is missing") from None
    if hashlib.sha256(raw).hexdigest() != reference.sha256:
        raise broken(archive, "is not the archive that the index names: its SHA-256 is another")
    if len(raw) != reference.size:
        raise broken(archive, f"has {len(raw)} bytes, of which the index says something else")
    # A private folder beside the target, renamed to it, so that two calls at once do not conflict.
    with _writing(path), unfinished_folder(path.absolute().parent, reference.name) as scratch:
        part = scratch / reference.name
        unpack(raw, archive, part)
        with told_of_archive(archive, part):
            _require_described(storage.open_run(part), reference, archive)
        try:
            part.rename(path)
        except OSError:
            _require_free(path)
            raise
    return path


def _scratch() -> AbstractContextManager[Path]:
    """Make a temporary folder that lasts as long as the context."""
    return unfinished_folder(Path(gettempdir()), "metaloom-reference", 0o700)


def _writing(place: Path) -> AbstractContextManager[None]:
    """Report system errors within the context as one error about a path that is written to."""
    needed = f"room and permission to write {place}, and to make folders in {gettempdir()}"
    return system_errors(place, required=needed, action="Free space, or choose another path")


def _require_free(path: Path) -> None:
    if path.exists():
        raise storage.RunExists(
            path, found="something is there already", required="a free path", action="Choose another name with --run"
        )


def _require_folder(path: Path) -> None:
    """Refuse a path under a URL."""
    if url := storage.url_of(path):
        raise UsageError(f"found {url}; required a run in a folder: references are copied from and to folders only")


def _told(run: Run) -> Mapping[str, Any]:
    """Return the index entries that the run itself states."""
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


def _require_described(run: Run, reference: Reference, archive: Path) -> None:
    """Refuse a run that is another one than the index says."""
    try:
        found = _told(run)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise broken(archive, f"holds no complete run ({type(error).__name__}: {error})") from None
    differing = [name for name, value in found.items() if value != getattr(reference, name)]
    if _thinned_learners(run, reference.learners):
        differing.append("learners")
    if differing:
        raise broken(archive, f"holds a run of which the index says something else: {', '.join(differing)}")


def _known_without(name: str, folder: Path) -> list[Reference]:
    """Return the references of a folder, after checking that none has this name."""
    known = read_index(folder) if (folder / INDEX).exists() else []
    if name in [reference.name for reference in known]:
        raise UsageError(f"{folder}: found a reference {name} already; required another name: --name NAME")
    return known


def _left_out(folder: str, names: Sequence[str]) -> set[str]:
    """Select files of a run's folder that are not copied. Links are refused, since their targets would be published."""
    left_out = {*_LEFT_OUT} & {*names}
    for name in {*names} - left_out:
        mode = os.lstat(place := Path(folder) / name).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise UsageError(f"{place}: found neither a file nor a folder; required a run alone: move it away")
    return left_out


@contextmanager
def _told_of(run: Run, copied: Path) -> Iterator[None]:
    """Report errors of a temporary copy as errors of the run itself."""
    try:
        yield
    except storage.DamagedRun as error:
        where = error.where.replace(str(copied), run.location)
        required = "a run of which what is kept is whole, and nothing beside it"
        action = f"`metaloom verify {storage.argument(run.path)}` lists all damage"
        raise storage.DamagedRun(where, found=error.found, required=required, action=action) from None


def _put(archive: Path, folder: Path) -> None:
    """Put an archive among others, over nothing: a file of its name is somebody's, or of an `add` that was killed."""
    place = folder / archive.name
    if place.exists():
        raise UsageError(
            f"{place}: found a file that the index does not know; required a free path: move it away, or --name NAME"
        )
    replace_file(place, archive.read_bytes(), folder / f".{archive.name}.part")


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Lock a folder of references while its index is rewritten, which takes moments."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        lock(descriptor, folder, wait=True)
        yield
    finally:
        os.close(descriptor)


def _require_learners(run: Run, every: int) -> None:
    if gone := _thinned_learners(run, every):
        raise UsageError(
            f"{run.location}: found learner {gone[0]} thinned; required one every {plural(every, 'iteration')}: "
            f"`metaloom replay {storage.argument(run.path)} --materialise` stores them again, or say which there are: "
            "--learners N"
        )


def _thinned_learners(run: Run, every: int) -> list[int]:
    """List the iterations whose initial learner is missing although a reference must have it."""
    return [i for i in run.iterations if not i % every and run.is_thinned(run.learner_ref(i))]

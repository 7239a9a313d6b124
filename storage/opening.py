"""Opening new and existing runs for writing."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from metaloom.storage.errors import linked, system_errors
from metaloom.storage.format.files import make_folders, read_file, sync_folder
from metaloom.storage.format.places import check_path, folder_of
from metaloom.storage.format.records import has_shards
from metaloom.storage.format.sessions import INFO_COPY, newest_session
from metaloom.storage.format.stages import ON_POLICY, StageTable
from metaloom.storage.format.thinning import KEEP_ALL, Retention
from metaloom.storage.keep.repair import Repair, info_copies, restore_info, sound_copy
from metaloom.storage.read.history import describe_missing, read_history, require_own_records
from metaloom.storage.read.info import first_session, read_info
from metaloom.storage.remote.log import follow
from metaloom.storage.run import Run
from metaloom.storage.write.array_store import ArrayStore
from metaloom.storage.write.creation import WRITABLE, check_free, creating, new_info, publish_info, write_skeleton
from metaloom.storage.write.sessions import Session, begin_session
from metaloom.storage.writer import RunWriter

_LOG = logging.getLogger(__name__)


def create_run(
    path: str | Path,
    *,
    config: Mapping[str, Any],
    config_digest: str,
    capacity: int,
    environment: Mapping[str, Any],
    stages: StageTable = ON_POLICY,
    retention: Retention = KEEP_ALL,
) -> RunWriter:
    """Create a run and open it for writing.

    Args:
        path: Folder or URL of the run; it must be empty or not exist.
        config: Settings, as plain JSON data.
        config_digest: Digest of the settings that affect results.
        capacity: Number of iterations to allocate; `open_writer` can raise it later.
        environment: Further facts that affect results or help to reproduce them, as plain JSON data.
        stages: Stages of the run; the default is the on-policy stages.
        retention: Rule that determines which iterations this writer keeps whole.

    Raises:
        InvalidRunName: the path cannot be printed on one line.
        RunExists: the path is not empty.
        RunLocked: another process is creating the same run.
        StorageFailed: the system rejects the write.
    """
    path = check_path(folder_of(path))
    if capacity < 1:
        raise ValueError(f"capacity is {capacity}; it must be at least 1")
    with creating(path):
        follow(path)
        check_free(path)
        make_folders(path)
        sync_folder(path.parent)  # an interrupted creation may have made the folder
        session = begin_session(path, take_over=False)
        try:
            check_free(path)
            write_skeleton(path, session, capacity)
            publish_info(path, session, new_info(config, config_digest, environment, stages))
            return _run_writer(path, session, None, repair=False, retention=retention)
        except BaseException:
            session.close()
            raise


def open_writer(
    path: str | Path,
    *,
    capacity: int | None = None,
    take_over: bool = False,
    repair: bool = False,
    retention: Retention = KEEP_ALL,
) -> RunWriter:
    """Open a run for writing.

    Args:
        path: Folder or URL of the run.
        capacity: Minimum number of iterations to allocate.
        take_over: True to take over from a writer that is hanging or whose host is dead.
        repair: True to check every file and repair the run; see `metaloom.storage.keep.repair`.
        retention: Rule that determines which iterations this writer keeps whole.

    Raises:
        RunNotFound, NotARun, IncompatibleFormat: there is no readable run at the path.
        RunLocked: another process is writing the run.
        DamagedRun: a record is damaged, or a committed file is missing or truncated.
        StorageFailed: the system rejects the write.
    """
    path = folder_of(path)
    follow(path)
    if not repair or sound_copy(path) is None:
        read_info(path)
    with system_errors(path, required=WRITABLE, action="Free space, or check the folder's permissions and its disk"):
        # Writing through symbolic links to folders, as in a run from elsewhere, would change their targets.
        inner = ("data.zarr/*", "data.zarr/*/*", "tables/*")
        names = ("run.json", "_commits", "_sessions", "_thinned", "_segments", "data.zarr", "tables")
        folders = [path / name for name in names]
        for pattern in (*inner, "_segments/*", *(f"_segments/*/{name}" for name in ("*", *inner))):
            folders += path.glob(pattern)
        if links := [folder for folder in folders if folder.is_symlink()]:
            raise linked(links[0])
        session = begin_session(path, take_over=take_over)
        try:
            with session.explained():  # a later writer may have removed the file
                return _run_writer(path, session, capacity, repair=repair, retention=retention)
        except BaseException:
            session.close()
            raise


def _run_writer(path: Path, session: Session, capacity: int | None, *, repair: bool, retention: Retention) -> RunWriter:
    """Return the writer for a session, repairing the run first if requested."""
    if repair and session.remote is not None:
        session.remote.give_up_damaged()
    repaired = restore_info(session) if repair else []
    run = Run(path, read_info(path), follow(path))
    if repair and run.files.segments.names():  # a damaged seal would make everything unreadable
        repaired += Repair(run.files, session, run.info).repair_segments()
        session.share()
    require_own_records(run.files, run.info)
    if repair:
        repaired += Repair(run.files, session, run.info).repair_run()
    # A killed session may have made folders that are not yet durable.
    for folder in (path, *path.glob("data.zarr/"), *path.glob("data.zarr/*/"), *path.glob("tables/")):
        sync_folder(folder)
    history = read_history(run.files, run.info)
    if history.newly_lost and not repair:
        known = newest_session(path, first_session(run.info))
        _LOG.warning("%s: %s; they will be recomputed", path, describe_missing(history.newly_lost, known))
    arrays = ArrayStore(run.files, session, shards=has_shards(run.info))
    arrays.grow(capacity or 0)
    head = {"head": history.head.document()} if history.head else {}
    session.describe({"lost": history.lost, "next_sequence": history.next_sequence, **head})
    if not info_copies(path):  # a run written by an earlier version
        session.put({session.folder / INFO_COPY: (read_file(path / "run.json", limit=2**30),)})
    session.remove(history.leftovers)
    session.share_all()
    return RunWriter(run, session, arrays, history, retention, repaired)

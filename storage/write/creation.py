"""Creation of a run's folder."""

import tempfile
import uuid
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from metaloom.storage.errors import RunExists, system_errors
from metaloom.storage.format.arrays import group_document
from metaloom.storage.format.files import make_folder, render, sealed, sync_folder
from metaloom.storage.format.places import argument, check_path, folder_of, location
from metaloom.storage.format.provenance import system, utc, versions
from metaloom.storage.format.records import FORMAT
from metaloom.storage.format.sessions import INFO_COPY
from metaloom.storage.format.stages import ON_POLICY, StageTable
from metaloom.storage.remote.log import follow
from metaloom.storage.write.sessions import Session

WRITABLE = "free space and permission to write the run"
_SKELETON = {"_commits", "_sessions", "data.zarr", "writer.lock"}


def check_new_run(path: str | Path) -> None:
    """Raise the error that `create_run` would raise for a path, without creating anything."""
    path = check_path(folder_of(path))
    with creating(path):
        follow(path)
        check_free(path)
        folder = next(folder for folder in (path, *path.parents) if folder.exists())
        with tempfile.TemporaryDirectory(prefix=".metaloom-", dir=folder):
            pass


def creating(path: Path) -> AbstractContextManager[None]:
    """Within the block, convert OSErrors to StorageFailed errors about creating a run."""
    action = "Free space, or choose a folder that can be written: export METALOOM_RUNS=/path/to/runs"
    return system_errors(path, required=WRITABLE, action=action)


def check_free(path: Path) -> None:
    """Raise RunExists unless a new run can be created at a path."""
    # A folder with only the skeleton is left from an interrupted creation.
    if not path.exists() and not path.is_symlink():
        return
    names = {entry.name for entry in path.iterdir()} if path.is_dir() else {"a file"}
    if names - _SKELETON:
        raise RunExists(
            location(path),
            found="there is a run" if "run.json" in names else f"there is {', '.join(sorted(names)[:3])}",
            required="a path where nothing is stored yet",
            action=f"`metaloom resume {argument(path)}`, in Python metaloom.resume({location(path)!r}), continues a "
            f"run; `metaloom rm {argument(path)}` removes it; choose another name for a new one",
        )


def write_skeleton(path: Path, session: Session, capacity: int) -> None:
    for name in ("_commits", "data.zarr"):
        make_folder(path / name)
    content = render(group_document({"capacity": capacity}), indented=True)
    session.put({path / "data.zarr" / "zarr.json": (content,)})
    sync_folder(path)


def publish_info(path: Path, session: Session, info: Mapping[str, Any]) -> None:
    """Turn a folder into a run by writing run.json and a copy of it."""
    content = render(info, indented=True)
    session.publish(content, path / "run.json")
    # Write the copy last, so that an interrupted and repeated creation does not leave another run's copy.
    session.put({session.folder / INFO_COPY: (content,)})


def new_info(
    config: Mapping[str, Any], config_digest: str, environment: Mapping[str, Any], stages: StageTable, **origin: Any
) -> dict[str, Any]:
    """Return the content of a new run's run.json; `origin` describes the run that it was forked from, if any."""
    return sealed(
        {
            "format": FORMAT,
            "id": str(uuid.uuid4()),
            "config": dict(config),
            "config_digest": config_digest,
            "environment": dict(environment),
            "stages": stages.document(),
            # For earlier versions, which otherwise assume an on-policy run.
            **({} if stages.last == ON_POLICY.last else {"last_stage": stages.last}),
            "system": system(),
            "versions": versions(),
            "created": utc(),
            **origin,
        }
    )

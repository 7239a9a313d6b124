"""Runs in a folder, or under the URL that it caches."""

from pathlib import Path

from metaloom.storage.errors import DamagedRun
from metaloom.storage.format.canonical import read_sealed
from metaloom.storage.format.places import folder_of, url_of
from metaloom.storage.remote.log import follow
from metaloom.storage.remote.objects import ObjectFolder


def find_runs(root: Path) -> list[Path]:
    """The folders of the runs below the folder of all runs, the newest first.

    A run that cannot be read is one of them, for whoever opens it to say why.

    Raises:
        StorageFailed: the object store cannot be read.
    """
    url = url_of(root)
    if url is None:
        folders = [entry for entry in root.iterdir() if entry.is_dir()] if root.is_dir() else []
        written = {folder: when for folder in folders if (when := _written(folder)) is not None}
        return sorted(written, key=lambda folder: written[folder], reverse=True)
    folders = (folder_of(f"{url}/{name}") for name in ObjectFolder(url).folders())
    created = {folder: when for folder in folders if (when := _created(folder)) is not None}
    return sorted(created, key=lambda folder: created[folder], reverse=True)


def _written(folder: Path) -> float | None:
    """Modification time of a run's run.json, of the folder if another user keeps us out; None if it is no run."""
    try:
        return (folder / "run.json").stat().st_mtime
    except PermissionError:
        return folder.stat().st_mtime
    except OSError:
        return None


def _created(folder: Path) -> str | None:
    """Time of creation of the run that a folder caches; None if there is none, "" if it cannot be read."""
    try:
        follow(folder)
        return str(read_sealed(folder / "run.json", indented=True).get("created", ""))
    except FileNotFoundError:
        return None
    except DamagedRun:
        return ""

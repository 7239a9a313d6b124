"""Which runs there are in a folder, or under the URL that it caches."""

from pathlib import Path

from storage.remote.log import follow
from storage.remote.objects import ObjectFolder
from storage.remote.places import folder_of, url_of


def find_runs(root: Path) -> list[Path]:
    """The folders of the runs below the folder of all runs, newest first; they follow what they cache.

    Raises:
        StorageFailed: the object store cannot be read.
    """
    url = url_of(root)
    if url is None:
        folders = [entry for entry in root.iterdir() if entry.is_dir()] if root.is_dir() else []
    else:
        folders = [folder_of(f"{url}/{name}") for name in ObjectFolder(url).folders() if not name.startswith(".")]
        for folder in folders:
            follow(folder)
    folders = [folder for folder in folders if (folder / "run.json").exists()]
    return sorted(folders, key=lambda folder: (folder / "run.json").stat().st_mtime, reverse=True)

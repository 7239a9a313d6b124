"""Folders of the cache, and the URLs they stand for. The path says it, so nothing has to be looked up."""

import os
import re
from pathlib import Path

from metaloom.storage.errors import InvalidRunName, path_argument

_URL = re.compile(r"([a-z][a-z0-9+]*)://(.*)", re.DOTALL)
_PART = re.compile(r"[A-Za-z0-9_\-][A-Za-z0-9_.\-]*")


def cache_root() -> Path:
    """Return the folder that caches runs under object storage: $METALOOM_CACHE, else one in the user's cache folder."""
    chosen = os.environ.get("METALOOM_CACHE")
    return Path(chosen or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "metaloom").expanduser().absolute()


def is_url(text: object) -> bool:
    """Tell whether a text is a URL and no path."""
    return isinstance(text, str) and _URL.fullmatch(text) is not None


def folder_of(place: str | os.PathLike[str]) -> Path:
    """The folder of a run or of all runs: the place itself if it is a path, its place in the cache if it is a URL.

    Raises:
        InvalidRunName: the URL has parts that no folder can have.
    """
    match = _URL.fullmatch(place) if isinstance(place, str) else None
    if match is None:
        return Path(place)
    if match[1] == "file":
        return Path(match[2])
    parts = match[2].rstrip("/").split("/")
    if not all(_PART.fullmatch(part) for part in parts):
        raise InvalidRunName(
            "URL",
            found=repr(place),
            required="SCHEME://BUCKET/FOLDER/... of letters, digits, '_', '-' and '.', no part beginning with '.'",
            action="Name the folder otherwise; options such as an endpoint go into the environment",
        )
    return cache_root().joinpath(match[1], *parts)


def url_of(folder: Path) -> str | None:
    """The URL that a folder of the cache stands for; None for every other folder."""
    try:
        parts = folder.absolute().relative_to(cache_root()).parts
    except ValueError:
        return None
    # Hidden folders are ours: logs, and forks in the making.
    return f"{parts[0]}://{'/'.join(parts[1:])}" if len(parts) > 1 and all(map(_PART.fullmatch, parts)) else None


def argument(folder: Path) -> str:
    """The run in a folder as an argument of commands that stands for this run alone, quoted for the shell."""
    return url_of(folder) or path_argument(folder)


def location(folder: Path) -> str:
    """Name of a folder for users: its URL if it stands for one."""
    return url_of(folder) or str(folder)

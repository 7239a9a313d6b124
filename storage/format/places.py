"""Names, paths and URLs of runs. A name cannot point outside the runs folder.

A run in object storage has a cache folder, whose path determines the run's URL and vice versa.
"""

import os
import re
import unicodedata
from pathlib import Path

from metaloom.storage.errors import InvalidRunName, path_argument

_URL = re.compile(r"([a-z][a-z0-9+]*)://(.*)", re.DOTALL)
_PART = re.compile(r"[A-Za-z0-9_\-][A-Za-z0-9_.\-]*")


def cache_root() -> Path:
    """Return the cache folder for runs in object storage: $METALOOM_CACHE, or a folder in the user's cache."""
    chosen = os.environ.get("METALOOM_CACHE")
    return Path(chosen or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "metaloom").expanduser().absolute()


def folder_of(place: str | os.PathLike[str]) -> Path:
    """Return the folder for a path or URL: the path itself, the path of a file URL, or another URL's cache folder."""
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
            action="Choose another folder name; set options such as an endpoint in environment variables",
        )
    return cache_root().joinpath(match[1], *parts)


def url_of(folder: Path) -> str | None:
    """Return the URL of a cache folder; None for other folders."""
    try:
        parts = folder.absolute().relative_to(cache_root()).parts
    except ValueError:
        return None
    # Hidden folders are internal: logs, and unfinished forks.
    return f"{parts[0]}://{'/'.join(parts[1:])}" if len(parts) > 1 and all(map(_PART.fullmatch, parts)) else None


def argument(folder: Path) -> str:
    """Return an unambiguous command-line argument for the run in a folder, quoted for the shell."""
    return url_of(folder) or path_argument(folder)


def location(folder: Path) -> str:
    """Return the URL of a folder if it has one, otherwise its path, for display."""
    return url_of(folder) or str(folder)


_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,99}")
_RESERVED = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?", re.IGNORECASE)  # device names on Windows


def run_path(name_or_path: str | os.PathLike[str], root: str | os.PathLike[str]) -> Path:
    """Return the folder of a run.

    A plain name means a run in the folder `root`; a Path, or text with a separator, is a path; a URL means its cache
    folder.
    """
    if isinstance(name_or_path, str) and _URL.fullmatch(name_or_path):
        return folder_of(name_or_path)
    if isinstance(name_or_path, str) and "/" not in name_or_path and os.sep not in name_or_path:
        return Path(root) / check_run_name(name_or_path)
    path = check_path(os.fspath(name_or_path))
    try:
        return path.expanduser()
    except RuntimeError:
        raise InvalidRunName(
            "path of a run",
            found=repr(str(path)),
            required="an existing user name after ~",
            action="Write the full path",
        ) from None


def check_path(path: str | os.PathLike[str]) -> Path:
    """Return the path as a Path, or raise InvalidRunName if it cannot be printed on one line and typed again."""
    text = os.fspath(path)
    # Control characters, line and paragraph separators, and bytes that do not decode to text.
    if any(unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") for character in text):
        raise InvalidRunName(
            "path of a run",
            found=repr(text),
            required="text without line breaks or control characters",
            action="Choose another path; `mv` renames the folder of a run",
        )
    return Path(text)


def check_run_name(name: str) -> str:
    """Return the name, or raise InvalidRunName if a run cannot have it on every system."""
    if not _NAME.fullmatch(name) or name.endswith(".") or _RESERVED.fullmatch(name):
        raise InvalidRunName(
            "run name",
            found=repr(name),
            required="1 to 100 letters, digits, '_', '-' and '.', not beginning with '.' or '-', not ending with '.', "
            "and not a Windows device name such as CON",
            action="Choose another name, or give a path such as ./NAME",
        )
    return name

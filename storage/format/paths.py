"""Names of runs, which cannot leave the folder of all runs, and paths, which say where they lead."""

import os
import re
import unicodedata
from pathlib import Path

from metaloom.storage.errors import InvalidRunName
from metaloom.storage.format.places import folder_of, is_url

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,99}")
_RESERVED = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?", re.IGNORECASE)  # devices, on Windows


def run_path(name_or_path: str | os.PathLike[str], root: str | os.PathLike[str]) -> Path:
    """Return the folder of a run.

    Args:
        name_or_path: a name stands for a run below `root`; what holds a separator, or is a Path, stands for itself;
            a URL stands for the folder that caches what is there.
        root: folder of all runs.

    Raises:
        InvalidRunName: the name is one that no run can have.
    """
    if is_url(name_or_path):
        return folder_of(name_or_path)
    if not isinstance(name_or_path, str) or "/" in name_or_path or os.sep in name_or_path:
        return _expanded(check_path(os.fspath(name_or_path)))
    return Path(root) / check_run_name(name_or_path)


def check_path(path: str | os.PathLike[str]) -> Path:
    """Return the path itself, if it can be told on one line and typed again.

    Raises:
        InvalidRunName: it holds line breaks, other control characters, or bytes that are no text.
    """
    text = os.fspath(path)
    if not all(map(_is_printed, text)):
        raise InvalidRunName(
            "path of a run",
            found=repr(text),
            required="text without line breaks and control characters",
            action="Choose another path; `mv` renames the folder of a run",
        )
    return Path(text)


def _is_printed(character: str) -> bool:
    # Neither a control character, nor the break of a line or paragraph, nor a byte that is no text.
    return unicodedata.category(character) not in ("Cc", "Cs", "Zl", "Zp")


def _expanded(path: Path) -> Path:
    try:
        return path.expanduser()
    except RuntimeError:
        raise InvalidRunName(
            "path of a run",
            found=repr(str(path)),
            required="the name of a user of this system behind ~",
            action="Write the path out",
        ) from None


def check_run_name(name: str) -> str:
    """Return the name itself, if a run can have it on every system.

    Raises:
        InvalidRunName: it cannot.
    """
    if not _NAME.fullmatch(name) or name.endswith(".") or _RESERVED.fullmatch(name):
        raise _refused(name)
    return name


def _refused(name: str) -> InvalidRunName:
    return InvalidRunName(
        "run name",
        found=repr(name),
        required="1 to 100 letters, digits, '_', '-' and '.', not beginning with '.' or '-', not ending with '.', "
        "and no device of Windows such as CON",
        action="Choose another name, or give a path such as ./NAME",
    )

"""Entry points of installed packages."""

import sys
from functools import cache
from importlib.metadata import EntryPoint, entry_points


def installed(group: str) -> list[EntryPoint]:
    """Return the entry points of a group. Installed packages are searched once."""
    return sorted(_search(tuple(sys.path)).select(group=group), key=lambda point: point.name)


@cache
def _search(path: tuple[str, ...]):
    del path
    return entry_points()

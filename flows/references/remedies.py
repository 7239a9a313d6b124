"""Damage to archives and their index, which no command repairs: they have to be obtained again."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from metaloom import storage

_AGAIN = "Get the folder's archives and index.json again from where they come from"


def broken(place: Path, found: str, *, action: str = _AGAIN) -> storage.DamagedRun:
    """Make the error for an archive or an index that is not what was added."""
    return storage.DamagedRun(place, found=found, required="what `metaloom reference add` wrote", action=action)


@contextmanager
def told_of_archive(archive: Path, unpacked: Path) -> Iterator[None]:
    """Report damage to a temporarily unpacked run as damage to its archive."""
    try:
        yield
    except (storage.DamagedRun, storage.NotARun, storage.StageMissing) as error:
        if str(unpacked) not in error.where:
            raise
        inside = error.where.replace(str(unpacked), "").lstrip("/") or "its run"
        found = error.found.replace(f"{unpacked}/", "")
        action = f"The index names this very archive, so it was added like this. {_AGAIN}, or ask who added it"
        raise broken(archive, f"{inside}: {found}", action=action) from None

"""Bytes that runs take on the disk."""

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from metaloom.storage.read.committed import file_stats


@dataclass(frozen=True)
class DiskUse:
    """What a run takes on the disk.

    Attributes:
        name, path: of the run.
        num_bytes: of all its files.
        only_remote: of those that are under its URL and not in the cache.
        shared: of those that it shares with another run by hard links; they stay when one of the two is removed.
        thinning: that go if all its complete iterations are thinned, and that no other run keeps.
        groups: by what they hold.
        stages: by stage and inner step, of what is committed.
        ranges: by the first and last iteration of a range.
        problem: why the rest is not known, of a damaged run.
    """

    name: str
    path: str
    num_bytes: int
    only_remote: int = 0
    shared: int = 0
    thinning: int = 0
    groups: Mapping[str, int] | None = None
    stages: Mapping[str, int] | None = None
    ranges: Mapping[tuple[int, int], int] | None = None
    problem: str = ""


def bytes_together(paths: Iterable[Path]) -> int:
    """Add up what folders take on this machine; a file that several of them share counts once."""
    return sum(status.st_size for status in _inodes(paths).values())


def bytes_freed(paths: Iterable[Path]) -> int:
    """Add up what is free once folders are removed: all but what others share with them by hard links."""
    paths = [*paths]
    links = Counter(_inode(status) for path in paths for _, status in file_stats(path))
    found = _inodes(paths)
    return sum(status.st_size for inode, status in found.items() if status.st_nlink == links[inode])


def _inodes(paths: Iterable[Path]) -> dict[tuple[int, int], os.stat_result]:
    return {_inode(status): status for path in paths for _, status in file_stats(path)}


def _inode(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino

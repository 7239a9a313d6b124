"""Bytes that runs take on the disk: of what, of which stages and iterations, shared with whom, and what could go."""

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from metaloom import storage
from metaloom.flows.views.formatting import stage_name
from metaloom.flows.views.run_info import bytes_by_group
from metaloom.storage import Run
from metaloom.storage.progress import Progress, unseen
from metaloom.storage.read.committed import file_stats

RANGES = 10
"""Into so many ranges of about as many iterations a run is divided."""


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


def disk_use(path: Path, on_progress: Progress = unseen) -> DiskUse:
    """Add up what a run takes; of one that cannot be read, only its files.

    Args:
        path: of the run.
        on_progress: Called with the number of outputs looked at so far, and of all.

    Raises:
        storage.RunNotFound, storage.NotARun: there is none.
    """
    stats = dict(file_stats(path))
    shared = {file for file, status in stats.items() if status.st_nlink > 1}
    local, name = sum(status.st_size for status in stats.values()), path.name
    shared_bytes = sum(stats[file].st_size for file in shared)
    try:
        run = storage.open_run(path)
        sizes = run.files.sizes()
        stages, iterations, thinnable = _committed(run, on_progress)
    except (storage.RunNotFound, storage.NotARun):
        raise
    except storage.StoreError as error:
        return DiskUse(name, storage.location(path), local, shared=shared_bytes, problem=error.found)
    return DiskUse(
        name,
        run.location,
        sum(sizes.values()),
        only_remote=sum(size for file, size in sizes.items() if file not in stats),
        shared=shared_bytes,
        thinning=sum(sizes[file] for file in thinnable if file in sizes and file not in shared),
        groups=dict(bytes_by_group(run)),
        stages=dict(stages),
        ranges=in_ranges(iterations),
    )


def bytes_together(paths: Iterable[Path]) -> int:
    """Add up what folders take on this machine; a file that several of them share counts once."""
    return sum(status.st_size for status in _inodes(paths).values())


def bytes_freed(paths: Iterable[Path]) -> int:
    """Add up what is free once folders are removed: all but what others share with them by hard links."""
    paths = [*paths]
    links = Counter(_inode(status) for path in paths for _, status in file_stats(path))
    found = _inodes(paths)
    return sum(status.st_size for inode, status in found.items() if status.st_nlink == links[inode])


def in_ranges(iterations: Mapping[int, int]) -> dict[tuple[int, int], int]:
    """Add up bytes by iteration over at most RANGES ranges of as many iterations, the last one perhaps shorter."""
    count = max(iterations, default=-1) + 1
    width = max(1, -(-count // RANGES))
    starts = range(0, count, width)
    return {
        (start, min(start + width, count) - 1): sum(iterations.get(i, 0) for i in range(start, start + width))
        for start in starts
    }


def _committed(run: Run, on_progress: Progress) -> tuple[Counter[str], Counter[int], list[str]]:
    """Bytes of what is stored in full by stage and by iteration, and the files that thinning would remove."""
    stages, iterations = Counter[str](), Counter[int]()
    removable = {*run.thinnable(run.iterations)}
    thinnable: list[str] = []
    refs = run.refs()
    for n, ref in enumerate(refs):
        on_progress(n, len(refs))
        record = run.record(ref)
        if run.files.is_thinned(record):
            continue
        stages[stage_name(ref)] += record.stored_bytes
        iterations[ref.iteration] += record.stored_bytes
        if ref in removable:
            found = (file for chunk in record.chunks for file in run.files.files_of(record, chunk))
            thinnable += [file.relative_to(run.path).as_posix() for file in found]
    return stages, iterations, thinnable


def _inodes(paths: Iterable[Path]) -> dict[tuple[int, int], os.stat_result]:
    return {_inode(status): status for path in paths for _, status in file_stats(path)}


def _inode(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino

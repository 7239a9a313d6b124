"""Disk usage of runs."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from metaloom.flows.formatting import plural, size
from metaloom.pipeline.shown import Row, Shown
from metaloom.storage import Thinned
from metaloom.storage.read.committed import file_stats


@dataclass(frozen=True)
class DiskUse:
    """Disk usage of a run. Sizes are in bytes."""

    name: str  # name of the run
    path: str  # path of the run's folder
    num_bytes: int  # total size of the run's files
    only_remote: int  # size of files in object storage that are not cached
    shared: int  # size of files shared with other runs by hard links, which remain when one run is removed
    thinning: int = 0  # size of the files that thinning all complete iterations would remove
    groups: Mapping[str, int] | None = None  # sizes keyed by kind of content
    stages: Mapping[str, int] | None = None  # sizes of committed files, keyed by stage and inner step
    ranges: Mapping[tuple[int, int], int] | None = None  # sizes per iteration range, keyed by first and last iteration
    problem: str = ""  # reason that the other sizes of a damaged run are unknown


@dataclass(frozen=True, repr=False)
class DiskUsage(Shown):
    """Disk usage of runs, and leftovers of interrupted removals; if `details` is True, also each run's contents."""

    uses: Sequence[DiskUse]
    paths: Sequence[Path]
    leftovers: Sequence[Path]
    details: bool

    def shown(self) -> tuple[str, list[Row]]:
        rows = [(use.name, *map(size, (use.num_bytes, use.shared, use.thinning)), use.problem) for use in self.uses]
        title = f"Disk usage of {plural(len(rows), 'run')}: {size(bytes_together(self.paths))}"
        return title, [("run", "size", "shared", "thinning would free", ""), *rows]

    def as_dict(self) -> dict[str, Any]:
        rows = [asdict(use) for use in self.uses]
        for row in rows:
            if row["ranges"] is not None:
                ranges = row["ranges"].items()
                row["ranges"] = [{"first": first, "last": last, "bytes": size} for (first, last), size in ranges]
        unfinished = {"paths": [*map(str, self.leftovers)], "bytes": bytes_together(self.leftovers)}
        return {"runs": rows, "bytes": bytes_together(self.paths), "unfinished_removals": unfinished}


@dataclass(frozen=True)
class ThinnedRun(Thinned):
    """Result of thinning, or of a dry run that removes nothing."""

    dry_run: bool = False

    def __str__(self) -> str:
        amount = f"{plural(len(self.iterations), 'iteration')}, {plural(self.files, 'file')}, {size(self.num_bytes)}"
        removed = "would remove" if self.dry_run else "removed"
        return f"{removed}: {amount}; a fork that shares files keeps them on the disk"


@dataclass(frozen=True)
class Packed:
    """Iteration range of each segment that packing wrote."""

    segments: tuple[range, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the total number of iterations, and the first and last iteration of each segment."""
        segments = [[segment.start, segment.stop - 1] for segment in self.segments]
        return {"iterations": sum(map(len, self.segments)), "segments": segments}

    def __str__(self) -> str:
        count = sum(map(len, self.segments))
        if not count:
            return "nothing to pack: every complete iteration but the newest is packed already"
        return f"packed {plural(count, 'iteration')} into {plural(len(self.segments), 'segment')}"


@dataclass(frozen=True)
class Removed:
    """Result of `rm`: removed runs, freed bytes, and folders of interrupted removals that were finished."""

    paths: tuple[Path, ...]
    freed: int
    finished: tuple[Path, ...]

    def __str__(self) -> str:
        last = f"{plural(len(self.finished), 'removal') if self.finished else 'no removal'} to finish"
        if self.paths:
            last = f"removed {plural(len(self.paths), 'run')}, {size(self.freed)} freed"
        return "\n".join([*(f"finished the removal of {path}" for path in self.finished), last])


def bytes_together(paths: Iterable[Path]) -> int:
    """Return the total disk usage of folders; shared files count once."""
    return sum(files[0].st_size for files in _by_inode(paths).values())


def bytes_freed(paths: Iterable[Path]) -> int:
    """Return the number of bytes freed by removing the folders; files that have hard links elsewhere do not count."""
    return sum(files[0].st_size for files in _by_inode(paths).values() if files[0].st_nlink == len(files))


def _by_inode(paths: Iterable[Path]) -> dict[tuple[int, int], list[os.stat_result]]:
    found: dict[tuple[int, int], list[os.stat_result]] = {}
    for status in (status for path in paths for _, status in file_stats(path)):
        found.setdefault((status.st_dev, status.st_ino), []).append(status)
    return found

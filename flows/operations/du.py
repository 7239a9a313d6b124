"""`du`: shows the disk usage of runs."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from metaloom import storage
from metaloom.flows.arguments import checked
from metaloom.flows.formatting import stage_name
from metaloom.flows.operations import late
from metaloom.flows.operations.options import RunArguments
from metaloom.flows.results.disk import DiskUsage, DiskUse
from metaloom.flows.runs import folders_of, runs_root
from metaloom.flows.views.status import STATUS
from metaloom.storage import Run
from metaloom.storage.progress import Progress, unseen
from metaloom.storage.read.committed import file_stats

RANGES = 10  # maximum number of iteration ranges into which a run is divided


@checked
def du(runs: RunArguments = ()) -> DiskUsage:
    """Show the disk usage of runs.

    It is broken down by content type, stage and iteration. The output also shows what is shared with forks and what
    thinning would free.

    Example: `metaloom du first`

    Args:
        runs: Runs to measure; all by default.
    """
    root = runs_root()
    named = folders_of(runs)
    paths = named or storage.find_runs(root)
    uses = [disk_use(path, STATUS.counted(f"outputs of run {n} of {len(paths)}")) for n, path in enumerate(paths, 1)]
    return DiskUsage(uses, paths, storage.unfinished_removals(root), details=bool(named))


def disk_use(path: Path, on_progress: Progress = unseen) -> DiskUse:
    """Return a run's disk usage; for an unreadable run, only the sizes of its files."""
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
        return DiskUse(name, storage.location(path), local, only_remote=0, shared=shared_bytes, problem=error.found)
    return DiskUse(
        name,
        run.location,
        sum(sizes.values()),
        only_remote=sum(size for file, size in sizes.items() if file not in stats),
        shared=shared_bytes,
        thinning=sum(sizes[file] for file in thinnable if file in sizes and file not in shared),
        groups=dict(late.bytes_by_group(run)),
        stages=dict(stages),
        ranges=in_ranges(iterations),
    )


def in_ranges(iterations: Mapping[int, int]) -> dict[tuple[int, int], int]:
    """Return the bytes per iteration range, keyed by (first, last): at most RANGES, all but the last equally long."""
    count = max((i + 1 for i in iterations), default=0)
    width = max(1, -(-count // RANGES))
    ranges = [range(start, min(start + width, count)) for start in range(0, count, width)]
    return {(found[0], found[-1]): sum(iterations.get(i, 0) for i in found) for found in ranges}


def _committed(run: Run, on_progress: Progress) -> tuple[Counter[str], Counter[int], list[str]]:
    """Return the stored bytes per stage and per iteration, and the files that thinning would remove."""
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

"""Operations that check, measure, shrink, remove and export stored runs."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from metaloom import storage
from metaloom.flows.arguments import checked
from metaloom.flows.errors import UsageError
from metaloom.flows.exports import By, format_names
from metaloom.flows.exports import export as export_run
from metaloom.flows.formatting import stage_name
from metaloom.flows.operations import late
from metaloom.flows.operations.options import (
    Natural,
    Positive,
    RemovedArguments,
    RunArgument,
    RunArguments,
    Trust,
    agree,
)
from metaloom.flows.results.checks import Verification
from metaloom.flows.results.disk import DiskUsage, DiskUse, Packed, Removed, ThinnedRun, bytes_freed
from metaloom.flows.runs import folder_of, folders_of, parse_span, run_folder, runs_root
from metaloom.flows.views.status import STATUS
from metaloom.storage import Retention, Run, StoreError, open_run, open_writer, verify_run
from metaloom.storage.export import Export
from metaloom.storage.progress import Progress, unseen
from metaloom.storage.read.committed import file_stats


@checked
def verify(run: RunArgument) -> Verification:
    """Check every stored file against its record.

    Exit code 0 if all files are intact, 1 if any is damaged, missing or unexpected. `metaloom resume RUN --repair`
    repairs or recomputes damaged and missing files; it does not remove files that do not belong to the run.

    Example: `metaloom verify first`

    Args:
        run: Run to check.
    """
    folder = folder_of(run)
    damages = verify_run(folder, STATUS.counted("outputs"))
    return Verification(folder, tuple(damages), sealed=bool(damages) or open_run(folder).is_sealed)


RANGES = 10  # maximum number of iteration ranges into which a run is divided


@checked
def du(runs: RunArguments = ()) -> DiskUsage:
    """Show the disk usage of runs.

    It is broken down by group, stage and iteration, with what is shared with forks and what could be freed.

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
        return DiskUse(name, storage.location(path), local, shared=shared_bytes, problem=error.found)
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
    """Return the bytes in each of at most RANGES iteration ranges, all of equal length except the last."""
    count = max(iterations, default=-1) + 1
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


@checked
def thin(
    run: RunArgument,
    *,
    keep_every: Positive | None = None,
    keep_last: Natural | None = None,
    dry_run: bool = False,
    anyway: bool = False,
    trust: Trust = False,
) -> ThinnedRun:
    """Remove batches that can be recomputed.

    The episodes, samples and adapted parameters of iterations are removed; everything else is kept. An off-policy run
    also keeps its episodes, which are its replay buffer: only minibatches and adapted parameters are removed. `metaloom
    replay RUN@ITERATION --materialise` recomputes what was removed, bit for bit. Iterations that used a plug-in, such
    as a custom environment, are therefore refused if its source has since changed.

    Example: `metaloom thin first --keep-every 10 --keep-last 5 --dry-run`

    Args:
        run: Run to thin.
        keep_every: Keep iterations 0, N, 2N, ... in full.
        keep_last: Keep the N newest iterations in full.
        dry_run: Only show what would be removed.
        anyway: Also remove batches that a changed plug-in can no longer recompute.
        trust: Allow importing the modules that the run's settings name, now and later.
    """
    folder = folder_of(run)
    agree(folder, trust)
    kept, far = Retention(keep_last=keep_last, keep_every=keep_every), STATUS.counted("iterations")
    thinned = late.thin_run(folder, kept, dry_run=dry_run, anyway=anyway, on_progress=far)
    return ThinnedRun(**vars(thinned), dry_run=dry_run)


@checked
def pack(run: RunArgument) -> Packed:
    """Pack old iterations into a few files.

    Their contents do not change. All complete iterations except the newest are packed. Training also packs the oldest
    500 iterations whenever 600 are unpacked.

    Example: `metaloom pack first`

    Args:
        run: Run to pack.
    """
    with open_writer(folder_of(run)) as writer:
        return Packed(tuple(writer.pack(STATUS.counted("iterations"))))


@checked
def rm(runs: RemovedArguments = ()) -> Removed:
    """Permanently remove runs after asking for confirmation.

    Without RUN, it finishes interrupted removals. Forks keep the files that they share with a removed run. Runs that
    are being trained, folders with other content, links, and runs in object storage are refused. Reports beside the run
    are kept.

    Example: `metaloom rm second --yes`

    Args:
        runs: Runs to remove. In Python, they are removed without asking.
    """
    paths = list(dict.fromkeys(map(check_removable, folders_of(runs))))
    freed = bytes_freed(paths)
    for n, path in enumerate(paths, 1):
        STATUS.far(f"run {n} of {len(paths)}")
        storage.remove_run(path)
    roots = dict.fromkeys([path.parent for path in paths] or [runs_root()])
    return Removed(tuple(paths), freed, tuple(path for root in roots for path in storage.finish_removals(root)))


def check_removable(path: Path) -> Path:
    """Return a run's folder if the run may be removed; raise UsageError or StoreError otherwise."""
    if url := storage.url_of(path):
        raise UsageError(
            f"cannot remove {url}, which is not a local folder. Remove the objects with the store's own tools, such as "
            f"`aws s3 rm --recursive {url}`, and then the cache, {path} and {path.parent / f'.{path.name}.log'}"
        )
    return storage.check_removable(path)


def dependents(path: Path, root: Path) -> list[str]:
    """Return lines that describe how other runs in a folder depend on a run."""
    run = _readable(path)
    others = [other for folder in storage.find_runs(root) if (other := _readable(folder)) is not None]
    lines: list[str] = []
    for other in others if run is not None else ():
        parent, start = other.info.get("parent"), other.config.get("init_from")
        if isinstance(parent, dict) and run is not None and parent.get("id") == run.info["id"]:
            lines.append(f"{other.name} is a fork of it and keeps everything they share")
        if _names(start, path):
            lines.append(
                f"{other.name} started from its learner and stores a copy of it, but its first stage could no longer "
                "be replayed"
            )
    return lines


def _names(start: Any, path: Path) -> bool:
    """Return True if a warm start's `init_from` setting names the run in a folder."""
    try:
        return isinstance(start, dict) and run_folder(str(start["run"])).resolve() == path.resolve()
    except (KeyError, StoreError):
        return False


def _readable(path: Path) -> storage.Run | None:
    try:
        return storage.open_run(path)
    except StoreError:
        return None


_FORMATS = f"Format: {', '.join(format_names())}, or module:FORMAT. Some require the extra of the same name."


@checked
def export(
    run: RunArgument,
    *,
    to: Annotated[str, Parameter(help=_FORMATS)],
    out: Path | str,
    iterations: str | None = None,
    step: Sequence[int] = (),
    by: By | None = None,
) -> Export:
    """Export a run to Parquet, Minari or another format.

    Example: `metaloom export first --to parquet --out first-parquet`

    Args:
        run: Run to export.
        to: Name of the format, or module:FORMAT.
        out: New or empty folder; with --to delta, it may contain the tables of other runs.
        iterations: N or FROM:TO, as in Python slicing; all complete ones by default.
        step: Export only the episodes of this inner step; repeatable.
        by: Write one learning history per task, or per index in the meta-batch.
    """
    chosen = None if iterations is None else parse_span("--iterations", iterations)
    far = STATUS.counted("iterations")
    return export_run(open_run(folder_of(run)), Path(out), to, iterations=chosen, steps=step, by=by, on_progress=far)

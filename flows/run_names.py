"""Several runs as a user names them: runs, patterns and sweeps."""

from collections.abc import Sequence

from metaloom import storage
from metaloom.flows.opened import Run, RunLike, open_run, open_runs
from metaloom.flows.sweeps.stored import find_sweep
from metaloom.storage import run_exists


def runs_named(names: Sequence[RunLike]) -> list[Run]:
    """Open the runs that names, paths, patterns and names of sweeps stand for; those of a sweep that have begun.

    Raises:
        UsageError: a pattern matches none.
        storage.StoreError: there is no such run, or it cannot be read.
    """
    return [run for name in names for run in _runs_of(name)]


def _runs_of(name: RunLike) -> Sequence[Run]:
    if isinstance(name, storage.Run):
        return [name if isinstance(name, Run) else Run.open(name.path)]
    if isinstance(name, str) and "://" not in name:
        if "*" in name or "?" in name:
            return open_runs(name)
        if "/" not in name and (sweep := find_sweep(name)) is not None:
            return [Run.open(folder) for run in sweep.runs if run_exists(folder := sweep.folder(run))]
    return [open_run(name)]

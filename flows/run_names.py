"""Several runs as a user names them: runs, patterns and sweeps."""

from collections.abc import Sequence

from metaloom import storage
from metaloom.flows.opened import Run, open_run, open_runs
from metaloom.flows.runs import RunLike
from metaloom.flows.sweeps.stored import find_sweep
from metaloom.storage import run_exists


def runs_named(names: Sequence[RunLike]) -> list[Run]:
    """Open the runs of names, paths, patterns and names of sweeps. Of a sweep, open the runs that have begun.

    Raises:
        UsageError: a pattern matches none.
        storage.StoreError: there is no such run, or it cannot be read.
    """
    found: list[Run] = []
    for name in names:
        if isinstance(name, storage.Run):
            found.append(name if isinstance(name, Run) else Run.open(name.path))
        elif isinstance(name, str) and "://" not in name and ("*" in name or "?" in name):
            found += open_runs(name)
        elif isinstance(name, str) and "/" not in name and (sweep := find_sweep(name)) is not None:
            found += [Run.open(folder) for run in sweep.runs if run_exists(folder := sweep.folder(run))]
        else:
            found.append(open_run(name))
    return found

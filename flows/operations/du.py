"""`du`: disk usage of runs."""

from typing import TYPE_CHECKING

from metaloom.flows.operations.options import RunArguments
from metaloom.flows.runs import folders_of, runs_root
from metaloom.flows.views.status import STATUS

if TYPE_CHECKING:
    from metaloom.flows.results.disk import DiskUsage


def du(runs: RunArguments = ()) -> "DiskUsage":
    """Show the disk usage of runs.

    By group, stage and iteration; what is shared with forks; what could be freed.

    Example: `metaloom du first`

    Args:
        runs: The runs; all by default.
    """
    from metaloom.flows.commands.disk import disk_use
    from metaloom.flows.results.disk import DiskUsage, DiskUse
    from metaloom.storage import find_runs, unfinished_removals

    root = runs_root()
    named = folders_of(runs)
    paths = named or find_runs(root)
    uses: list[DiskUse] = []
    for n, path in enumerate(paths, 1):
        uses.append(disk_use(path, STATUS.counted(f"outputs of run {n} of {len(paths)}")))
    return DiskUsage(uses, paths, unfinished_removals(root), details=bool(named))

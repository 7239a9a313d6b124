"""`rm`: runs are removed for good."""

from pathlib import Path

from metaloom.flows.operations.options import RemovedArguments
from metaloom.flows.results.disk import Removed
from metaloom.flows.runs import folders_of, runs_root
from metaloom.flows.views.status import STATUS


def rm(runs: RemovedArguments = ()) -> Removed:
    """Remove runs for good, after asking.

    Without RUN, it finishes removals that were interrupted.

    Forks keep what they share with a run. Refused are runs that somebody writes, folders that hold anything else,
    links, and runs under object storage. Reports beside the run stay.

    Example: `metaloom rm second --yes`

    Args:
        runs: The runs. Python removes them without asking.
    """
    from metaloom.flows.commands.remove import check_removable
    from metaloom.flows.results.disk import bytes_freed
    from metaloom.storage import finish_removals, remove_run

    paths = list(dict.fromkeys(map(check_removable, folders_of(runs))))
    freed = bytes_freed(paths)
    for n, path in enumerate(paths, 1):
        STATUS.far(f"run {n} of {len(paths)}")
        remove_run(path)
    roots = dict.fromkeys([path.parent for path in paths] or [runs_root()])
    finished: list[Path] = [path for root in roots for path in finish_removals(root)]
    return Removed(tuple(paths), freed, tuple(finished))

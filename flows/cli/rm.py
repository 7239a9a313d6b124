"""`metaloom rm`."""

import sys
from contextlib import nullcontext
from typing import Annotated

from cyclopts import Parameter

from metaloom.flows.cli.options import RUN_HELP, Flag, complete_runs
from metaloom.flows.cli.output import console
from metaloom.flows.errors import UsageError
from metaloom.flows.runs import run_folder, runs_root
from metaloom.flows.views.status import STATUS

Runs = Annotated[tuple[str, ...], Parameter(help=f"{RUN_HELP} Repeatable.", negative=(), completer=complete_runs)]


def rm(runs: Runs = (), /, *, yes: Flag = False) -> int:
    """Remove runs for good, after asking.

    Without RUN, it finishes removals that were interrupted.

    Forks keep what they share with a run. Refused are runs that somebody writes, folders that hold anything else,
    links, and runs under object storage. Reports beside the run stay.

    Example: `metaloom rm second --yes`

    Args:
        yes: Do not ask.
    """
    from metaloom.flows.commands.remove import check_removable, dependents
    from metaloom.flows.formatting import plural, size
    from metaloom.flows.results.disk import bytes_freed
    from metaloom.storage import finish_removals, remove_run

    tell = console().out
    paths = list(dict.fromkeys(check_removable(run_folder(run)) for run in runs))
    for path in paths:
        tell(f"to remove: {path}")
        for line in dependents(path, path.parent):
            tell(f"  {line}")
    freed = bytes_freed(paths)
    if paths and not yes:
        if not sys.stdin.isatty():
            raise UsageError("found no terminal to ask on; required --yes")
        STATUS.end()
        answer = input(f"{plural(len(paths), 'run')}, {size(freed)} to be freed. Remove? [y/N] ")
        if answer.strip().lower() not in ("y", "yes"):
            tell("nothing removed")
            return 1
    with nullcontext() if yes else STATUS.shown("removing", console()):
        for n, path in enumerate(paths, 1):
            STATUS.far(f"run {n} of {len(paths)}")
            remove_run(path)
    roots = dict.fromkeys([path.parent for path in paths] or [runs_root()])
    finished = [path for root in roots for path in finish_removals(root)]
    for path in finished:
        tell(f"finished the removal of {path}")
    left = plural(len(finished), "removal") if finished else "no removal"
    tell(f"removed {plural(len(paths), 'run')}, {size(freed)} freed" if paths else f"{left} to finish")
    return 0

"""`metaloom ls`."""

from metaloom.flows.cli.options import AsJson
from metaloom.flows.cli.output import console, print_json
from metaloom.flows.runs import runs_root
from metaloom.storage import location


def list_runs(*, as_json: AsJson = False) -> int:
    """List the runs in the runs folder.

    Example: `METALOOM_RUNS=/data/runs metaloom ls`
    """
    from metaloom.flows.views.tables import list_run_rows, runs_table

    rows = list_run_rows(runs_root())
    if as_json:
        print_json(rows)
    elif rows:
        console().print(runs_table(rows))
    else:
        console().print(f"no runs in {location(runs_root())}; `metaloom train promp-point-corner` makes one")
    return 0

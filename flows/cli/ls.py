"""`metaloom ls`."""

from metaloom.flows.cli.options import AsJson
from metaloom.flows.cli.output import answer
from metaloom.flows.runs import runs_root
from metaloom.storage import location


def list_runs(*, as_json: AsJson = False) -> int:
    """List the runs in the runs folder.

    Example: `METALOOM_RUNS=/data/runs metaloom ls`
    """
    from metaloom.flows.views.run_info import list_run_rows
    from metaloom.flows.views.tables import runs_table

    rows = list_run_rows(runs_root())
    nothing = f"no runs in {location(runs_root())}; `metaloom train promp-point-corner` makes one"
    answer(as_json, lambda: rows, lambda: runs_table(rows) if rows else nothing)
    return 0

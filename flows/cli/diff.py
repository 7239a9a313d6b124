"""`metaloom diff`."""

from metaloom.flows.cli.options import AsJson, RunArgument
from metaloom.flows.cli.output import answer
from metaloom.flows.runs import run_folder


def diff(run_a: RunArgument, run_b: RunArgument, *, as_json: AsJson = False) -> int:
    """Find the first output in which two runs differ.

    It also compares settings, code and packages.

    Exit code 0 when settings and outputs are equal, 1 when they differ.

    Example: `metaloom diff first second`
    """
    from metaloom.flows.commands.diff import diff_runs
    from metaloom.flows.views.comparison_tables import diff_view

    outcome = diff_runs(run_folder(run_a), run_folder(run_b))
    answer(as_json, outcome.as_dict, lambda: diff_view(outcome))
    return 0 if outcome.equal else 1

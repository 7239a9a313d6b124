"""`diff`: the first output in which two runs differ."""

from typing import TYPE_CHECKING

from metaloom.flows.operations.options import RunArgument
from metaloom.flows.runs import folder_of

if TYPE_CHECKING:
    from metaloom.flows.results.diff import RunDiff


def diff(run_a: RunArgument, run_b: RunArgument) -> "RunDiff":
    """Find the first output in which two runs differ.

    It also compares settings, code and packages.

    Exit code 0 when settings and outputs are equal, 1 when they differ.

    Example: `metaloom diff first second`

    Args:
        run_a: A run.
        run_b: Another run.
    """
    from metaloom.flows.commands.diff import diff_runs

    return diff_runs(folder_of(run_a), folder_of(run_b))

"""`logs`: prints the log of a run."""

from typing import TYPE_CHECKING, Literal

from metaloom.flows.arguments import checked
from metaloom.flows.operations import late
from metaloom.flows.operations.options import RunArgument
from metaloom.flows.runs import folder_of
from metaloom.storage import open_run

if TYPE_CHECKING:
    from metaloom.flows.run_log import LogLines


Level = Literal["debug", "info", "warning", "error"]


@checked
def logs(run: RunArgument, *, level: Level = "info") -> "LogLines":
    """Print the log of a run.

    It contains warnings, errors, iterations and lines from your own loggers.

    Example: `metaloom logs first --level warning`

    Args:
        run: Run to read.
        level: Minimum level of the lines; debug includes every stage.
    """
    lines = late.LogReader(open_run(folder_of(run)).path).new_lines()
    return late.LogLines(line for line in lines if line.is_at_least(level))

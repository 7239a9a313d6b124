"""`logs`: the log of a training run."""

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
    """Print the log of a training run.

    These are warnings, errors, iterations and lines from your loggers.

    Example: `metaloom logs first --level warning`

    Args:
        run: The run.
        level: Minimum level of lines; debug includes every stage.
    """
    return late.LogLines(
        line for line in late.LogReader(open_run(folder_of(run)).path).new_lines() if line.is_at_least(level)
    )

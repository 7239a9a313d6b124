"""`watch`: follows a run that another process trains."""

import time
from typing import TYPE_CHECKING, Annotated

from metaloom.flows.arguments import checked
from metaloom.flows.operations import late
from metaloom.flows.operations.options import PythonOnly, RunArgument
from metaloom.flows.runs import folder_of

if TYPE_CHECKING:
    from metaloom.flows.views.watching import Ending


@checked
def watch(run: RunArgument, *, lines: Annotated[bool, PythonOnly] = False) -> "Ending":
    """Follow a run while another process trains it.

    It ends when the training ends. Ctrl-C stops watching without affecting the training. Exit code 0 if the run
    completed or was stopped, 1 if it failed or was killed. Without a terminal, it prints a line for the newest
    iteration and for each one after it.

    Example: `metaloom watch first`

    Args:
        run: Run to follow.
        lines: Print a JSON object for each iteration.
    """
    return late.watch_run(folder_of(run), mode="json" if lines else "auto", wait=time.sleep)

"""`metaloom watch`."""

import time
from contextlib import suppress

from metaloom.flows.cli.options import AsJson, RunArgument
from metaloom.flows.cli.output import OutputClosed, say
from metaloom.flows.runs import run_folder
from metaloom.flows.views.status import STATUS


def watch(run: RunArgument, *, as_json: AsJson = False) -> int:
    """Follow a run while another process trains it.

    It ends with the training. Ctrl-C ends it too and does not touch the training.

    Exit code 0 when it is complete or was stopped, 1 when it failed or was killed. Without a terminal it prints a line
    for the newest iteration and each one that follows.

    Example: `metaloom watch first`
    """
    from metaloom.flows.views.watching import watch_run

    STATUS.end()
    with suppress(KeyboardInterrupt):
        try:
            ending = watch_run(run_folder(run), mode="json" if as_json else "auto", wait=time.sleep)
        except BrokenPipeError:
            raise OutputClosed from None
        say(as_json, ending.message)
        return 0 if ending.went_well else 1
    return 0

"""`metaloom logs`."""

import json
import time
from contextlib import suppress
from typing import Annotated, Literal

from cyclopts import Parameter

from metaloom.flows.cli.options import AsJson, RunArgument
from metaloom.flows.cli.output import console
from metaloom.flows.runs import run_folder
from metaloom.pipeline.shown import printable
from metaloom.storage import current_writer, open_run


def logs(
    run: RunArgument,
    *,
    follow: Annotated[bool, Parameter(name=("--follow", "-f"), negative=(), show_default=False)] = False,
    level: Literal["debug", "info", "warning", "error"] = "info",
    as_json: AsJson = False,
) -> int:
    """Print what the training of a run has logged.

    These are warnings, errors, iterations and the lines of your loggers.

    Example: `metaloom logs first --level warning`

    Args:
        follow: Go on with what is logged from now on, until nobody writes the run or you press Ctrl-C.
        level: Leave out what matters less; debug has every stage.
        as_json: Print the lines as they are stored, a JSON object each.
    """
    from metaloom.flows.run_log import LogLine, LogReader

    opened = open_run(run_folder(run))
    reader, place = LogReader(opened.path), ""

    def text(line: LogLine) -> str:
        if as_json:
            return json.dumps(line.fields)
        where = f" {line.ref.iteration} {line.ref.stage} k={line.ref.step}" if line.ref else ""
        return f"{line.time[:19].replace('T', ' ')} {line.level:7}{printable(where)}  {line.message}"

    with suppress(KeyboardInterrupt):
        while True:
            writer = current_writer(opened.path, opened.files.remote)
            for line in reader.new_lines():
                place = "here"
                if line.is_at_least(level):
                    console().out(text(line))
            if not follow or writer is None:
                break
            time.sleep(0.5)
    if not place and not as_json:
        console().out(
            f"no log of {opened.location} here: it was trained by an earlier version, or on another machine, or has "
            "been copied without it"
        )
    return 0

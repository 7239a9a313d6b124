"""Filter of Prefect's log under `metaloom serve`: no alarms about faults that `serve` repairs or cancelled runs."""

import logging
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from metaloom.flows.prefect_app.home import write

# They notify a worker of cancelled flow runs until its server is gone once; from then on the caretaker does.
OBSERVERS = ("FlowRunCancellingObserver", "FlowRunSuspendingObserver")
# Exceptions that a flow run ends with because it was cancelled, or `serve` was stopped, which Prefect takes for
# unexpected.
ENDED = ("CancelledRun", "TerminationSignal")
# What `serve` has asked to end, before or after the handler is there by which a training finishes its stage.
ABORTED = "Crash detected! Execution was aborted by a termination signal"
# One for each event that did not reach a server which is gone; the flow says so once.
LOST_EVENT = "Service 'EventsWorker' failed to process item"


class WithoutFalseAlarms(logging.Filter):
    """Lets through what is worth reading."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Tell if a record is shown."""
        message = record.getMessage()
        kind = record.exc_info[0] if record.exc_info else None
        return not (
            record.name.rpartition(".")[2] in OBSERVERS
            or (record.name == "asyncio" and any(name in message for name in OBSERVERS))
            or (kind is not None and kind.__name__ in ENDED)
            or message.startswith((LOST_EVENT, ABORTED))
        )


def write_settings(home: Path) -> Path:
    """Write Prefect's log settings with the filter added, and return the file for Prefect to read."""
    import yaml

    # find_spec does not import Prefect, which would read settings files of the folder.
    prefect = find_spec("prefect")
    assert prefect is not None
    assert prefect.origin is not None
    own = Path(prefect.origin).parent / "logging" / "logging.yml"
    settings: dict[str, Any] = yaml.safe_load(own.read_text("utf-8"))
    settings["filters"] = {"false_alarms": {"()": f"{__name__}.{WithoutFalseAlarms.__name__}"}}
    for handler in settings["handlers"].values():
        handler["filters"] = ["false_alarms"]
    file = home / "logging.yml"
    write(file, yaml.safe_dump(settings))
    return file

"""What Prefect's log leaves out under `metaloom serve`: alarms about what `serve` mends, and about cancelled runs."""

import logging
from pathlib import Path
from typing import Any

# They tell a worker of cancelled flow runs until its server is gone once; from then on the caretaker does.
OBSERVERS = ("FlowRunCancellingObserver", "FlowRunSuspendingObserver")
# An exception that a flow run ends with because it was cancelled, which Prefect takes for unexpected.
CANCELLED = "CancelledRun"
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
            or (kind is not None and kind.__name__ == CANCELLED)
            or message.startswith(LOST_EVENT)
        )


def write_settings(home: Path) -> Path:
    """Write Prefect's own settings of its log with the filter added; returns the file, which Prefect is to read."""
    import yaml
    from prefect.logging.configuration import DEFAULT_LOGGING_SETTINGS_PATH

    settings: dict[str, Any] = yaml.safe_load(DEFAULT_LOGGING_SETTINGS_PATH.read_text("utf-8"))
    settings["filters"] = {"false_alarms": {"()": f"{__name__}.{WithoutFalseAlarms.__name__}"}}
    for handler in settings["handlers"].values():
        handler["filters"] = ["false_alarms"]
    file = home / "logging.yml"
    file.write_text(yaml.safe_dump(settings), "utf-8")
    return file

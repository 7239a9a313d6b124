"""A run's log: JSON lines that its trainer writes to `_operator/log.jsonl` in the run's folder.

It contains trainer events and the records of Python's logging and warnings, including those from Dask workers. It is
not part of the run's content and may be deleted.
"""

import json
import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, TextIO, cast

from metaloom.flows.formatting import plural
from metaloom.flows.observer import IterationReport, Observer
from metaloom.pipeline.shown import MOST_ROWS, Row, Shown, printable
from metaloom.storage import RunWriter, StageRef, StoreError
from metaloom.storage.format.files import open_file
from metaloom.storage.write.holder import FOLDER, operator_folder

NAME = "log.jsonl"
MOST_BYTES, OLDER_FILES = 1_000_000, 4
"""Maximum size of a log file in bytes before it is rotated, and maximum number of rotated files."""
_LONGEST_MESSAGE = 10_000
_EARLY_RECORDS = 100
_CHATTY = ("distributed", "bokeh", "asyncio")
"""Libraries that log every connection; only their warnings and errors are stored."""
_MOST_READ = 16 * MOST_BYTES
LEVELS = ("debug", "info", "warning", "error")


class RunLog(logging.Handler):
    """Logging handler that writes a run's log. Records are buffered until the run is known."""

    def __init__(self) -> None:
        super().__init__()
        self._early, self._place = list[logging.LogRecord](), dict[str, Any]()
        self._file: _LogFile | None = None
        self._logged: BaseException | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record to the log, and show it on the console if no other handler does."""
        # A handler at the root logger disables Python's handler of last resort, which shows warnings.
        if logging.lastResort is not None and record.levelno >= logging.lastResort.level and self._shows(record):
            logging.lastResort.handle(record)
        if record.levelno >= logging.WARNING or record.name.partition(".")[0] not in _CHATTY:
            self._write(record)

    @contextmanager
    def of(self, writer: RunWriter, workers: object) -> Iterator[None]:
        """Within the block, write to the log of the writer's run, including an error that ends the block."""
        path = writer.run.path
        self._place = {"run": path.name, "session": writer.session}
        early, self._early = self._early, []
        try:
            self._file = _LogFile(operator_folder(path) / NAME)
        except (OSError, StoreError) as error:
            logging.getLogger(__name__).warning("%s: cannot write a log: %s", path, error)
        else:
            for record in early:
                self._write(record)
            begins = f"session {writer.session} begins; rollouts in {workers}"
            self.log_event(logging.INFO, begins, workers=str(workers))
        try:
            yield
        except BaseException as error:
            # Log the end before releasing the run, so that waiting processes find it.
            self.log_end(error)
            raise

    def log_end(self, error: BaseException) -> None:
        """Log why the training ended, unless this error is already logged."""
        if error is not self._logged:
            self._logged = error
            kind = type(error).__name__
            self.log_event(logging.ERROR, f"ends with {kind}: {error}", ended_by=kind)

    def log_event(self, level: int, message: str, **facts: Any) -> None:
        """Log a trainer event without showing it on the console."""
        record = logging.LogRecord("metaloom.trainer", level, "", 0, message, None, None)
        record.facts = facts
        self._write(record)

    def observing(self, observer: Observer, writer: RunWriter) -> Observer:
        """Return an observer that also logs events, and stops training if `metaloom cancel` requests it."""

        def stage_started(ref: StageRef) -> None:
            self._place |= {"iteration": ref.iteration, "stage": ref.stage, "step": ref.step}
            self.log_event(logging.DEBUG, "stage begins")

        def iteration_done(report: IterationReport) -> None:
            i = report.iteration
            self.log_event(logging.INFO, f"iteration {i} ({i + 1} of {report.iterations}) done")

        def should_stop() -> bool:
            asked = "`metaloom cancel`" if writer.is_asked_to_stop() else None
            by = "this process" if observer.should_stop() else asked
            if by is not None:
                self.log_event(logging.INFO, f"stops at the request of {by}")
            return by is not None

        return replace(observer.after(stage_started, iteration_done), should_stop=should_stop)

    def close(self) -> None:
        """Close the log file. Later records are buffered."""
        if self._file is not None:
            self._file.close()
            self._file = None
        super().close()

    def _shows(self, record: logging.LogRecord) -> bool:
        """Return True if only handlers of this class receive the record, and this one receives it first."""
        logger: logging.Logger | None = logging.getLogger(record.name)
        handlers: list[logging.Handler] = []
        while logger is not None:
            handlers += logger.handlers
            logger = logger.parent if logger.propagate else None
        return all(isinstance(handler, RunLog) for handler in handlers) and handlers[:1] == [self]

    def _write(self, record: logging.LogRecord) -> None:
        if self._file is None:
            self._early = [*self._early, record][-_EARLY_RECORDS:]
        else:
            record.place = dict(self._place)
            self._file.handle(record)


class _LogFile(RotatingFileHandler):
    """Rotating log files. If they cannot be written, lines are lost without an error."""

    def __init__(self, path: Path) -> None:
        if path.is_symlink():
            raise OSError(f"{path} is a symbolic link")
        with path.open("ab+") as file:
            if file.tell() and not (file.seek(-1, os.SEEK_END) >= 0 and file.read() == b"\n"):
                file.write(b"\n")  # an earlier writer was killed in the middle of a line
        super().__init__(
            path, maxBytes=MOST_BYTES, backupCount=OLDER_FILES, encoding="utf-8", errors="backslashreplace"
        )
        self.setFormatter(_JsonLines())

    def handleError(self, record: logging.LogRecord) -> None:
        """Skip the line. A full disk stops the run itself, with a better message."""


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)  # with an exception's traceback
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            **getattr(record, "place", {}),
            "logger": printable(record.name),
            "message": printable(text[:_LONGEST_MESSAGE]),
            **getattr(record, "facts", {}),
        }
        return json.dumps(line, ensure_ascii=False)


@contextmanager
def kept_log() -> Iterator[RunLog]:
    """Yield a RunLog that collects log records and warnings during the block; `RunLog.of` determines the run."""
    log, root = RunLog(), logging.getLogger()
    level, show = root.level, warnings.showwarning
    if not root.handlers and level == logging.WARNING:
        # If logging is not configured, the console still shows only warnings.
        root.setLevel(logging.INFO)
    root.addHandler(log)

    def showwarning(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, *more: TextIO | str | None
    ) -> None:
        show(message, category, filename, lineno, *cast(Any, more))
        log.log_event(logging.WARNING, f"{category.__name__}: {message} ({filename}:{lineno})")

    warnings.showwarning = showwarning
    try:
        yield log
    except BaseException as error:
        log.log_end(error)
        raise
    finally:
        warnings.showwarning = show
        root.removeHandler(log)
        root.setLevel(level)
        log.close()


@dataclass(frozen=True)
class LogLine:
    """A line in a log, with printable text; `fields` is the line's JSON object."""

    time: str
    level: str
    message: str
    fields: dict[str, Any]

    @classmethod
    def parse(cls, raw: str) -> "LogLine | None":
        """Return the line that a JSON object describes, or None if it is truncated or invalid."""
        with suppress(ValueError, KeyError, TypeError, RecursionError):
            fields = json.loads(raw)
            time, level, message = (printable(fields[name]) for name in ("time", "level", "message"))
            return cls(time, level, message, fields)
        return None

    @property
    def ref(self) -> StageRef | None:
        """Stage that was running; None before the first stage."""
        with suppress(KeyError, TypeError, ValueError):
            return StageRef.parse(self.fields)
        return None

    def is_at_least(self, level: str) -> bool:
        """Return True if the line's level is at least this level, or unknown."""
        return self.level not in LEVELS or LEVELS.index(self.level) >= LEVELS.index(level)


class LogLines(Shown, list[LogLine]):
    """Lines of a log, oldest first."""

    def shown(self) -> tuple[str, list[Row]]:
        """Return a title, and the time, level and message of the newest lines, for display."""
        rows = [(line.time[:19].replace("T", " "), line.level, line.message) for line in self[-MOST_ROWS:]]
        return f"{plural(len(self), 'line')}{f', the last {len(rows)}' if len(rows) < len(self) else ''}", rows


class LogReader:
    """Reader of a run's log, which starts at the oldest line and continues with new lines."""

    def __init__(self, run: Path) -> None:
        self._path = run / FOLDER / NAME
        self._inode, self._offset = 0, 0
        self._is_followed = False

    def new_lines(self) -> Sequence[LogLine]:
        """Return the complete lines written since the last call."""
        raw = self._rest_of_older()
        self._inode, new = _read(self._path, self._offset)
        whole = new[: new.rfind(b"\n") + 1]
        self._offset += len(whole)
        lines = (raw + whole).decode("utf-8", "replace").split("\n")
        return [line for text in lines if (line := LogLine.parse(text)) is not None]

    def _rest_of_older(self) -> bytes:
        """Return the unread content of rotated files."""
        older = [self._path.with_name(f"{NAME}.{n}") for n in range(OLDER_FILES, 0, -1)]
        if not self._is_followed:
            self._is_followed = True
            return b"".join(_read(path)[1] + b"\n" for path in older)
        if _read(self._path, self._offset)[0] == self._inode:
            return b""
        inode, rest = _read(older[-1], self._offset)
        self._offset = 0
        return rest if inode == self._inode else b""


def _read(path: Path, offset: int = 0) -> tuple[int, bytes]:
    """Return a regular file's inode and its bytes after an offset, or 0 and no bytes if there is no such file."""
    with suppress(OSError, StoreError), open_file(path) as file:
        file.seek(offset)
        return os.fstat(file.fileno()).st_ino, file.read(_MOST_READ) or b""
    return 0, b""

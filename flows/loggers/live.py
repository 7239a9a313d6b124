"""Live logging: an observer that opens loggers with the run, and calls each after every iteration until it fails."""

import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

from metaloom.flows.films.opengl import RendererName, choose_renderer
from metaloom.flows.loggers import MODULES, check_loggers, function_named
from metaloom.flows.observer import IterationReport, Observer
from metaloom.flows.opened import FinishedIteration
from metaloom.flows.opened import Run as OpenedRun
from metaloom.storage import Run, StageMissing, location, open_run, url_of

log: logging.Logger = logging.getLogger(__name__)

_Open = Callable[[Run, Path], "RunLogger"]
FILM_SIZE = (320, 240)
_ACCESS = re.compile(r"//[^/\s]+@")
"""Credentials in a URL. They are removed from logged errors, which are stored with the run."""


class RunLogger(Protocol):
    """Logger of a single run. Subclasses may omit `film` and `close`."""

    def iteration(self, report: IterationReport, ended: float) -> None:
        """Log an iteration that ended at `ended`, in seconds since 1970."""

    def film(self, file: Path, report: IterationReport) -> None:
        """Log a GIF of an iteration's episodes; the file is deleted afterwards."""

    def close(self, failed: bool) -> None:
        """Finish logging; `failed` is True if an error ended the training."""


def opener(name: str) -> _Open:
    """Return the function that opens the named logger for a run."""
    if name in MODULES:
        return import_module(f"metaloom.flows.loggers.{name}").open_logger
    return partial(_Function, function_named(name))


class _Function(RunLogger):
    """Logger that calls a function with each finished iteration."""

    def __init__(self, function: Callable[[FinishedIteration], object], run: Run, folder: Path) -> None:
        self._function, self._run = function, OpenedRun.open(run.path)

    def iteration(self, report: IterationReport, ended: float) -> None:
        self._function(FinishedIteration(self._run, report.iteration, report))


def log_folder(run: Path) -> Path:
    """Return the folder for loggers' local files: beside the run, or in the working directory for object storage."""
    return Path("logs") if url_of(run) else run.parent / "logs"


@contextmanager
def logging_to(
    names: Sequence[str], folder: Path, observer: Observer, *, film_every: int | None = None
) -> Iterator[Observer]:
    """Yield an observer that also logs iterations during the block.

    The run need not exist yet. A video is logged every `film_every` iterations and after the last one.
    """
    check_loggers(names, film_every)
    if not names:
        yield observer
        return
    filmed = any(name in MODULES for name in names)
    # Choose the renderer now, since MuJoCo chooses one on import.
    renderer = choose_renderer("auto") if filmed else None
    loggers = _Loggers({name: opener(name) for name in names}, folder, film_every, renderer)

    try:
        reads = observer.reads or any(name not in MODULES for name in names)
        yield replace(observer.after(lambda ref: loggers.open(), loggers.iteration), reads=reads)
    except BaseException:
        loggers.close(failed=True)
        raise
    loggers.close(failed=False)


class _Loggers:
    """Group of loggers, each of which is used until it fails."""

    def __init__(
        self, openers: Mapping[str, _Open], folder: Path, film_every: int | None, renderer: RendererName | None
    ) -> None:
        self._waiting, self._folder, self._film_every = dict(openers), folder, film_every
        self._open: dict[str, RunLogger] = {}
        self._renderer: RendererName | None = renderer
        self._to_film: IterationReport | None = None

    def open(self) -> None:
        """Open the loggers that are not open yet. The run must exist."""
        while self._waiting:
            name, opened = self._waiting.popitem()
            with self._ends_if_it_fails(name):
                self._open[name] = opened(open_run(self._folder), log_folder(self._folder))

    def iteration(self, report: IterationReport) -> None:
        """Log an iteration, after the pending video of the previous one."""
        ended = time.time()
        self._film(is_last_chance=False)
        self._call_each(lambda logger: logger.iteration(report, ended))
        number = report.iteration + 1
        is_due = number >= report.iterations or (self._film_every is not None and number % self._film_every == 0)
        if is_due and self._renderer is not None:
            self._to_film = report

    def close(self, *, failed: bool) -> None:
        """Log the pending video and close all loggers."""
        if not failed:
            self._film(is_last_chance=True)
        self._call_each(lambda logger: logger.close(failed))
        self._open.clear()

    def _film(self, *, is_last_chance: bool) -> None:
        """Log a video if one is due and the outputs of its iteration are already visible."""
        report = self._to_film
        if report is None or self._renderer is None or not self._open:
            return
        from metaloom.flows.films.video import video

        with TemporaryDirectory(prefix="metaloom-film-") as folder:
            file = Path(folder) / f"iteration-{report.iteration:08d}.gif"
            try:
                video(self._folder, report.iteration, file, size=FILM_SIZE, every=2, renderer=self._renderer)
            except Exception as error:
                if isinstance(error, StageMissing) and not is_last_chance:
                    return
                self._renderer = None
                log.warning("%s: no videos are logged: %s", location(self._folder), error)
            else:
                self._call_each(lambda logger: logger.film(file, report))
        self._to_film = None

    def _call_each(self, what: Callable[[RunLogger], None]) -> None:
        for name, logger in [*self._open.items()]:
            with self._ends_if_it_fails(name):
                what(logger)

    @contextmanager
    def _ends_if_it_fails(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            text = _ACCESS.sub("//...@", f"{type(error).__name__}: {error}".splitlines()[0])
            log.warning("%s: %s stopped logging this run, which continues: %s", location(self._folder), name, text)
            if (logger := self._open.pop(name, None)) is not None:
                with suppress(Exception):
                    logger.close(failed=True)

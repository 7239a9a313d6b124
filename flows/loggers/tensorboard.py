"""TensorBoard's event files. Needs the extra `tensorboard`."""
# Neither TensorBoard nor its messages bring types.
# pyright: reportMissingTypeStubs=false

from pathlib import Path
from typing import Any

from PIL import Image

from metaloom.flows.errors import ExtraMissing
from metaloom.flows.loggers.numbers import distributions, return_name, scalars, timings
from metaloom.flows.observer import IterationReport
from metaloom.storage import Run
from metaloom.storage.format.settings import dotted


class EventFile:
    """Writes what TensorBoard shows of a run into a new file of a folder.

    Args:
        folder: of the run's events.
        settings: of the run, for the table of hyper-parameters.

    Raises:
        ExtraMissing: TensorBoard is not installed.
    """

    def __init__(self, folder: Path, settings: dict[str, bool | int | float | str]) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError:
            raise ExtraMissing("tensorboard") from None
        self._event, self._summary = event_pb2.Event, summary_pb2.Summary  # pyright: ignore[reportAttributeAccessIssue]
        self._settings = settings
        self._file: Any = EventFileWriter(str(folder))
        self._begun = False

    def iteration(self, report: IterationReport, ended: float) -> int:
        """Write an iteration's numbers and histograms; returns how many numbers."""
        from torch.utils.tensorboard.summary import histogram, hparams

        if not self._begun:
            self._begun, name = True, return_name(report)
            for summary in hparams(self._settings, {} if name is None else {name: 0.0}):
                self._add(summary.value, report, ended)
        numbers = scalars(report)
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in numbers.items()]
        values += [self._summary.Value(tag=tag, simple_value=value) for tag, value in timings(report).items()]
        self._add(values, report, ended)
        for tag, returns in distributions(report).items():
            self._add(histogram(tag, returns, bins="auto").value, report, ended)
        return len(numbers)

    def film(self, file: Path, report: IterationReport, ended: float) -> None:
        """Write a GIF, which TensorBoard plays among the images."""
        with Image.open(file) as picture:
            width, height = picture.size
        image = self._summary.Image(width=width, height=height, colorspace=3, encoded_image_string=file.read_bytes())
        self._add([self._summary.Value(tag="film", image=image)], report, ended)

    def close(self) -> None:
        """Write out what is still kept back."""
        self._file.close()

    def _add(self, values: Any, report: IterationReport, ended: float) -> None:
        summary = self._summary(value=values)
        self._file.add_event(self._event(wall_time=ended, step=report.iteration, summary=summary))


def hyper_parameters(run: Run) -> dict[str, bool | int | float | str]:
    """Settings as TensorBoard's table takes them: what is neither a number nor text, as text."""
    return {
        name: value if isinstance(value, bool | int | float | str) else str(value) for name, value in dotted(run.config)
    }


class _Live:
    """Begins a new file of the run's events in FOLDER/tensorboard/RUN."""

    def __init__(self, run: Run, folder: Path) -> None:
        self._events = EventFile(folder / "tensorboard" / run.path.name, hyper_parameters(run))
        self._ended = 0.0

    def iteration(self, report: IterationReport, ended: float) -> None:
        self._ended = ended
        self._events.iteration(report, ended)

    def film(self, file: Path, report: IterationReport) -> None:
        self._events.film(file, report, self._ended)

    def close(self, failed: bool) -> None:
        del failed
        self._events.close()


open_logger = _Live

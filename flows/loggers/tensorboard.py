"""Logger for TensorBoard. Requires the extra `tensorboard`."""

from pathlib import Path
from typing import Any

from PIL import Image

from metaloom.flows.errors import ExtraMissing
from metaloom.flows.loggers.numbers import distributions, return_name, scalars, timings
from metaloom.flows.observer import IterationReport
from metaloom.storage import Run
from metaloom.storage.format.settings import dotted


class EventFile:
    """Logger that writes a run's TensorBoard data to a new file in `folder`."""

    def __init__(self, run: Run, folder: Path) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError:
            raise ExtraMissing("tensorboard") from None
        self._event, self._summary = event_pb2.Event, summary_pb2.Summary  # pyright: ignore[reportAttributeAccessIssue]
        # TensorBoard's table of hyperparameters only supports numbers and text.
        self._settings = {
            name: value if isinstance(value, bool | int | float | str) else str(value)
            for name, value in dotted(run.config)
        }
        self._file: Any = EventFileWriter(str(folder))
        self._begun, self._ended = False, 0.0

    def iteration(self, report: IterationReport, ended: float) -> int:
        """Write an iteration's metrics and histograms, and return the number of metrics."""
        from torch.utils.tensorboard.summary import histogram, hparams

        self._ended = ended
        if not self._begun:
            self._begun, name = True, return_name(report)
            for summary in hparams(self._settings, {} if name is None else {name: 0.0}):
                self._add(summary.value, report)
        numbers = scalars(report)
        shown = {**numbers, **timings(report)}
        self._add([self._summary.Value(tag=tag, simple_value=value) for tag, value in shown.items()], report)
        for tag, returns in distributions(report).items():
            self._add(histogram(tag, returns, bins="auto").value, report)
        return len(numbers)

    def film(self, file: Path, report: IterationReport) -> None:
        """Write a GIF, which TensorBoard shows among the images."""
        with Image.open(file) as picture:
            width, height = picture.size
        image = self._summary.Image(width=width, height=height, colorspace=3, encoded_image_string=file.read_bytes())
        self._add([self._summary.Value(tag="film", image=image)], report)

    def close(self, failed: bool = False) -> None:
        self._file.close()

    def _add(self, values: Any, report: IterationReport) -> None:
        summary = self._summary(value=values)
        self._file.add_event(self._event(wall_time=self._ended, step=report.iteration, summary=summary))


def open_logger(run: Run, folder: Path) -> EventFile:
    """Return a logger that writes a new event file for the run in FOLDER/tensorboard/RUN."""
    return EventFile(run, folder / "tensorboard" / run.path.name)

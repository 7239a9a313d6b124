"""A run's metrics as TensorBoard events. Needs the extra `tensorboard`."""

from datetime import datetime
from pathlib import Path

from metaloom.flows.errors import ExtraMissing
from metaloom.flows.exports import ExportFormat
from metaloom.storage import Run
from metaloom.storage.export import Export
from metaloom.storage.run import Iterations


def export_tensorboard(run: Run, folder: Path, done: Export, *, iterations: Iterations = None) -> None:
    """Write every metric as a scalar over iterations, with the wall time at which the iteration ended.

    Raises:
        ExtraMissing: TensorBoard is not installed.
    """
    try:
        from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ImportError:
        raise ExtraMissing("tensorboard") from None
    writer = EventFileWriter(str(folder))
    try:
        for i in run.select(iterations):
            record, metrics = run.record(run.last_ref(i)), run[i].metrics()
            values = [Summary.Value(tag=_tag(name), simple_value=value) for name, value in metrics.items()]
            ended = datetime.fromisoformat(record.started).timestamp() + record.seconds
            writer.add_event(Event(wall_time=ended, step=i, summary=Summary(value=values)))
            done.iterations += 1
            done.rows += len(values)
    finally:
        writer.close()


def _tag(metric: str) -> str:
    """Put a slash after the prefix, by which TensorBoard groups tags: metrics of an inner step go together."""
    group, dot, name = metric.partition(".")
    return f"{group}/{name}" if dot else f"update/{metric}"


FORMAT = ExportFormat(export_tensorboard)

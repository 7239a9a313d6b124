"""Export to TensorBoard events, as the logger writes them during training. Needs the extra `tensorboard`."""

from contextlib import closing
from pathlib import Path

from metaloom.flows.exports import ExportFormat
from metaloom.flows.formatting import seconds_of
from metaloom.flows.loggers.tensorboard import EventFile
from metaloom.flows.views.stored_reports import StoredReports
from metaloom.storage import Run
from metaloom.storage.export import Export
from metaloom.storage.run import Iterations


def export_tensorboard(run: Run, folder: Path, done: Export, *, iterations: Iterations = None) -> None:
    """Write each iteration's scalars and histograms, with the iteration's end as wall time."""
    events, reports = EventFile(run, folder), StoredReports(run)
    chosen = run.select(iterations)
    with closing(events):
        for i in chosen:
            done.progress(done.iterations, len(chosen))
            record = run.record(run.last_ref(i))
            done.rows += events.iteration(reports.of(i), seconds_of(record.started, 0.0) + record.seconds)
            done.iterations += 1


FORMAT = ExportFormat(export_tensorboard)

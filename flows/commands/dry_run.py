"""What a run would take: environment steps from its settings; memory, disk and time from its first two iterations."""

import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from metaloom import storage
from metaloom.flows.commands.train import IterationReport, Observer, train
from metaloom.flows.estimate import most_steps, refusal_of
from metaloom.flows.formatting import count, duration, plural, short_time, size
from metaloom.flows.graph.check import check_graph
from metaloom.flows.graph.warm_start import pinned
from metaloom.flows.rollouts.workers import Backend
from metaloom.flows.views.report import write_report
from metaloom.pipeline.config.run import RunConfig
from metaloom.pipeline.memory import machine_memory
from metaloom.storage.unfinished import unfinished_folder

_PROBED, _PROBE_SECONDS = 2, 120.0


@dataclass(frozen=True)
class Probe:
    """What two iterations took.

    Attributes:
        trainer_bytes: most memory of this process so far.
        worker_bytes: most memory of a process that it started; 0 where it samples by itself.
        start_bytes: disk for what is stored once.
        iteration_bytes: disk for an iteration; None if no second one was complete in two minutes.
        iteration_seconds: wall seconds of the second iteration; None likewise.
    """

    trainer_bytes: int
    worker_bytes: int
    start_bytes: int
    iteration_bytes: int | None
    iteration_seconds: float | None


@dataclass(frozen=True)
class DryRun:
    """What a run would take, beside what this machine has.

    Attributes:
        iterations: of the run.
        workers: processes of this machine that sample.
        steps: of environments per iteration, if no episode ends early.
        machine_memory_bytes: that processes can have.
        free_disk_bytes: where the run is to be stored.
        probe: what was measured, if it was asked for.
        refusal: why the run cannot fit, None if it may.
    """

    iterations: int
    workers: int
    steps: int
    machine_memory_bytes: int
    free_disk_bytes: int
    probe: Probe | None = None
    refusal: str | None = None

    @property
    def run_bytes(self) -> int | None:
        """Disk for the run, before its retention removes anything; None if it was not measured."""
        found = self.probe
        if found is None or found.iteration_bytes is None:
            return None
        return found.start_bytes + self.iterations * found.iteration_bytes

    @property
    def run_seconds(self) -> float | None:
        """Wall seconds of the run without evaluations; None if they were not measured."""
        seconds = self.probe and self.probe.iteration_seconds
        return None if seconds is None else seconds * self.iterations

    def document(self) -> dict[str, Any]:
        """Return all of it as JSON data."""
        return asdict(self) | {"run_bytes": self.run_bytes, "run_seconds": self.run_seconds}

    def table(self) -> Table:
        """Return all of it for people."""
        found, table = self.probe, Table("", "per iteration", "for the run", "there is", box=None)
        unknown = "not measured; --probe does" if found is None else "longer than the probe"
        trainer = unknown if found is None else size(found.trainer_bytes)
        workers = unknown if found is None else f"{plural(self.workers, 'worker')} of {size(found.worker_bytes)}"
        disk, times = (unknown, ""), (unknown, "")
        if found is not None and found.iteration_bytes is not None and found.iteration_seconds is not None:
            disk = size(found.iteration_bytes), size(self.run_bytes or 0)
            times = short_time(found.iteration_seconds), duration(self.run_seconds or 0.0)
        rows: Sequence[tuple[str, str, str, str]] = (
            ("environment steps, at most", count(self.steps), count(self.steps * self.iterations), ""),
            ("memory, trainer", trainer, "", size(self.machine_memory_bytes)),
            ("memory, workers", workers if self.workers else "none", "", ""),
            ("disk", *disk, f"{size(self.free_disk_bytes)} free"),
            ("time", *times, ""),
        )
        for row in rows:
            table.add_row(*row)
        return table


def dry_run(config: RunConfig, folder: Path, backend: Backend = Backend(), *, probe: bool = False) -> DryRun:
    """Count what a run takes, be it too much, and create nothing.

    Args:
        config: of the run.
        folder: where it would be kept.
        backend: where rollouts would run.
        probe: measure memory, disk and time, with two iterations in a temporary folder, if the run may fit.

    Raises:
        ConfigError, EnvError: a setting is wrong.
        storage.RunExists: there is such a run already.
    """
    storage.check_new_run(folder)
    check_graph(config)
    config = pinned(config)
    refusal = refusal_of(config)
    existing = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    return DryRun(
        config.iterations,
        0 if backend.scheduler is not None else backend.for_tasks(config.num_tasks).workers or 0,
        most_steps(config),
        machine_memory(),
        shutil.disk_usage(existing).free,
        _probe(config, backend) if probe and refusal is None else None,
        refusal,
    )


def _probe(config: RunConfig, backend: Backend) -> Probe:
    """Train two iterations, and write the report: in the first one, things are imported and built."""
    ends, stored, began = [0.0], [0], time.monotonic()
    evaluation = config.evaluation.model_copy(update={"every": None})
    short = config.model_copy(update={"iterations": min(_PROBED, config.iterations), "evaluation": evaluation})
    with unfinished_folder(Path(tempfile.gettempdir()), "metaloom-probe", 0o700) as folder:

        def note(report: IterationReport) -> None:
            ends.append(report.elapsed_seconds)
            stored.append(sum(file.stat().st_size for file in (folder / "run").rglob("*") if file.is_file()))

        too_long = lambda: time.monotonic() - began > _PROBE_SECONDS  # noqa: E731
        train(short, folder / "run", backend=backend, observer=Observer(iteration_done=note, should_stop=too_long))
        complete = len(ends) - 1 == short.iterations
        if complete:  # charts take memory too
            write_report(storage.open_run(folder / "run"), folder / "report")
    iteration_bytes = stored[-1] - stored[-2]
    return Probe(
        trainer_bytes=_most_memory(resource.RUSAGE_SELF),
        # Of the largest process that has ended by now.
        worker_bytes=_most_memory(resource.RUSAGE_CHILDREN) if backend.for_tasks(config.num_tasks).workers else 0,
        start_bytes=max(stored[-1] - _PROBED * iteration_bytes, 0) if complete else 0,
        iteration_bytes=iteration_bytes if complete else None,
        iteration_seconds=ends[-1] - ends[-2] if complete else None,
    )


def _most_memory(who: int) -> int:
    return resource.getrusage(who).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

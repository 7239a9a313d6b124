"""What a run would take: memory, disk and environment steps from its settings, time from its first two iterations."""

import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from metaloom import storage
from metaloom.flows.commands.train import IterationReport, Observer, train
from metaloom.flows.estimate.forms import Forms
from metaloom.flows.estimate.limits import Machine, size_up
from metaloom.flows.estimate.sizes import Estimate
from metaloom.flows.graph.check import check_graph
from metaloom.flows.graph.warm_start import pinned
from metaloom.flows.rollouts.workers import Backend
from metaloom.flows.views.formatting import count, duration, plural, short_time, size
from metaloom.pipeline.config.run import RunConfig
from metaloom.storage.unfinished import unfinished_folder

_PROBED, _PROBE_SECONDS = 2, 120.0


@dataclass(frozen=True)
class DryRun:
    """What a run would take, beside what this machine has.

    Attributes:
        iterations: of the run.
        estimate: its sizes.
        machine: what there is.
        seconds: wall seconds of the second iteration; None if it was not measured, or not complete in two minutes.
        probed: seconds were asked for.
        refusal: why the run cannot fit, None if it can.
    """

    iterations: int
    estimate: Estimate
    machine: Machine
    seconds: float | None
    probed: bool
    refusal: str | None = None

    def document(self) -> dict[str, Any]:
        """Return all of it as JSON data."""
        about = {"iterations": self.iterations, **asdict(self.estimate), "memory_bytes": self.estimate.memory_bytes}
        return about | {
            "machine_memory_bytes": self.machine.memory,
            "free_disk_bytes": self.machine.disk,
            "iteration_seconds": self.seconds,
            "run_seconds": None if self.seconds is None else self.seconds * self.iterations,
            "refusal": self.refusal,
        }

    def table(self) -> Table:
        """Return all of it for people."""
        found, table = self.estimate, Table("", "per iteration", "for the run", "there is", box=None)
        evaluating = f", {count(found.evaluation_steps)} per evaluation" if found.evaluation_steps else ""
        workers = f"{plural(found.workers, 'worker')} of {size(found.worker_bytes)}" if found.workers else ""
        rows: Sequence[tuple[str, str, str, str]] = (
            ("memory, trainer", "", size(found.trainer_bytes), size(self.machine.memory)),
            ("memory, workers", "", workers or "none", ""),
            ("disk", size(found.iteration_bytes), size(found.run_bytes), f"{size(self.machine.disk)} free"),
            ("environment steps", count(found.steps), count(found.steps * self.iterations) + evaluating, ""),
            ("time", *self._times(), ""),
        )
        for row in rows:
            table.add_row(*row)
        return table

    def _times(self) -> tuple[str, str]:
        if self.seconds is not None:
            return short_time(self.seconds), duration(self.seconds * self.iterations)
        return ("longer than the probe" if self.probed else "not measured; --probe does"), ""


def dry_run(config: RunConfig, folder: Path, backend: Backend = Backend(), *, probe: bool = False) -> DryRun:
    """Estimate what a run takes, be it too much, and create nothing.

    Args:
        config: of the run.
        folder: where it would be kept.
        backend: where rollouts would run.
        probe: measure the time of an iteration, with two of them in a temporary folder, if the run fits.

    Raises:
        ConfigError, EnvError: a setting is wrong.
        storage.RunExists: there is such a run already.
    """
    storage.check_new_run(folder)
    check_graph(config)
    config = pinned(config)
    found, refusal = size_up(config, folder, backend, forms=Forms.of(config, act=True))
    seconds = _probe(config, backend) if probe and refusal is None else None
    return DryRun(config.iterations, found, Machine.here(folder), seconds, probe and refusal is None, refusal)


def _probe(config: RunConfig, backend: Backend) -> float | None:
    """Measure the second iteration: in the first one, things are imported and built."""
    reports: list[IterationReport] = []
    began = time.monotonic()
    observer = Observer(iteration_done=reports.append, should_stop=lambda: time.monotonic() - began > _PROBE_SECONDS)
    evaluation = config.evaluation.model_copy(update={"every": None})
    short = config.model_copy(update={"iterations": min(_PROBED, config.iterations), "evaluation": evaluation})
    with unfinished_folder(Path(tempfile.gettempdir()), "metaloom-probe", 0o700) as folder:
        train(short, folder / "run", backend=backend, observer=observer)
    ends = [0.0, *(report.elapsed_seconds for report in reports)]
    return ends[-1] - ends[-2] if len(reports) == short.iterations else None

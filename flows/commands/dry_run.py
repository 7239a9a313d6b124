"""Estimated cost of a run: environment steps from its settings; memory, disk and time from its first iterations."""

import resource
import shutil
import tempfile
import time
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.table import Table

from metaloom import storage
from metaloom.flows.commands.train import train
from metaloom.flows.estimate import most_steps, refusal_of
from metaloom.flows.formatting import count, duration, plural, short_time, size
from metaloom.flows.graph.check import check_graph
from metaloom.flows.graph.warm_start import pinned
from metaloom.flows.observer import IterationReport, Observer
from metaloom.flows.rollouts.workers import Backend
from metaloom.flows.usage import Sample, UsageSampler, most_memory
from metaloom.pipeline.config.run import RunConfig
from metaloom.pipeline.memory import machine_memory
from metaloom.storage.unfinished import unfinished_folder

_PROBED, _PROBE_SECONDS = 10, 120.0
_ENOUGH_SECONDS = 20.0


@dataclass(frozen=True)
class Probe:
    """Measured cost of a run's first iterations: ten, or as few as two if they take more than 20 seconds."""

    trainer_bytes: int  # peak memory of this process so far
    worker_bytes: int  # peak memory of the largest worker process; 0 without workers
    sample: Sample | None  # measurements of the iterations; None if two iterations took more than two minutes


@dataclass(frozen=True)
class DryRun:
    """Estimated cost of a run, and the resources of this machine."""

    iterations: int
    workers: int  # number of sampling processes on this machine
    steps: int  # environment steps per iteration if no episode ends early
    machine_memory_bytes: int  # memory available to processes
    free_disk_bytes: int  # free space on the disk that will hold the run
    probe: Probe | None = None
    refusal: str | None = None  # why the run exceeds this machine's resources; None if it may fit

    def document(self) -> dict[str, Any]:
        """Return the estimate as JSON data, with the run's duration and its disk usage before thinning."""
        sample = self.probe and self.probe.sample
        disk = sample and sample.disk_bytes(self.iterations)
        return asdict(self) | {"run_bytes": disk, "run_seconds": sample and sample.seconds(self.iterations)}

    def table(self) -> Table:
        found, table = self.probe, Table("", "per iteration", "for the run", "available", box=None)
        unknown = "not measured; use --probe" if found is None else "longer than the probe"
        trainer = unknown if found is None else size(found.trainer_bytes)
        workers = unknown if found is None else f"{plural(self.workers, 'worker')} of {size(found.worker_bytes)}"
        disk, times = (unknown, ""), (unknown, "")
        if found is not None and (sample := found.sample) is not None:
            disk = size(sample.disk_bytes(2) - sample.disk_bytes(1)), size(sample.disk_bytes(self.iterations))
            times = short_time(sample.iteration_seconds), duration(sample.seconds(self.iterations))
        table.add_row("environment steps, at most", count(self.steps), count(self.steps * self.iterations))
        table.add_row("memory, trainer", trainer, "", size(self.machine_memory_bytes))
        table.add_row("memory, workers", workers if self.workers else "none")
        table.add_row("disk", *disk, f"{size(self.free_disk_bytes)} free")
        table.add_row("time", *times)
        return table


def dry_run(config: RunConfig, folder: Path, backend: Backend = Backend(), *, probe: bool = False) -> DryRun:
    """Return the estimated cost of a run, even of one too large for this machine, without creating the run."""
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
    """Run a few training iterations in a temporary folder, write a report if possible, and return their cost."""
    sampler, began, sample = UsageSampler(), time.monotonic(), None
    evaluation = config.evaluation.model_copy(update={"every": None})
    short = config.model_copy(update={"iterations": min(_PROBED, config.iterations), "evaluation": evaluation})
    with unfinished_folder(Path(tempfile.gettempdir()), "metaloom-probe", 0o700) as folder:

        def enough() -> bool:
            return time.monotonic() - began > (_PROBE_SECONDS if sampler.iterations < 2 else _ENOUGH_SECONDS)

        def note(report: IterationReport) -> None:
            nonlocal sample
            run = storage.open_run(folder / "run")
            sampler.add(run, report)
            if sampler.iterations > 1:
                sample = sampler.sample(run)

        observer = Observer(iteration_done=note, should_stop=enough, reads=True)  # sizes need whole iterations
        train(short, folder / "run", backend=backend, observer=observer)
        if sampler.iterations and find_spec("matplotlib"):  # charts also take memory
            from metaloom.flows.views.report import write_report

            write_report(storage.open_run(folder / "run"), folder / "report")
    return Probe(
        trainer_bytes=most_memory(resource.RUSAGE_SELF),
        # Peak memory of the largest process that has ended.
        worker_bytes=most_memory(resource.RUSAGE_CHILDREN) if backend.for_tasks(config.num_tasks).workers else 0,
        sample=sample,
    )

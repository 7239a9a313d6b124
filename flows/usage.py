"""Memory, disk space and time of a run: estimated from its first iterations, and recorded."""

import json
import os
import resource
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

from metaloom.flows.observer import IterationReport, Observer
from metaloom.flows.run_log import MOST_BYTES, OLDER_FILES
from metaloom.storage import Run, StoreError
from metaloom.storage.format.files import read_file
from metaloom.storage.write.holder import FOLDER, operator_folder
from metaloom.storage.write.packer import MARGIN, SIZE

NAME = "usage.json"
_LARGEST = 4096
_WRITE_EVERY_SECONDS = 5.0
_RECORDS_PACKED = 6  # factor by which packing shrinks records; packed tables are negligible


@dataclass(frozen=True)
class Sample:
    """Measurements from the first iterations of a run."""

    iterations: int  # number of measured iterations
    memory_bytes: int  # peak memory of the process
    first_seconds: float  # duration of the first iteration in seconds, including imports and setup
    iteration_seconds: float  # median duration of the other iterations in seconds
    start_bytes: int  # number of bytes stored once per run
    # Bytes stored per iteration:
    array_bytes: int
    table_bytes: int
    record_bytes: int
    log_bytes: int

    def seconds(self, iterations: int) -> float:
        """Return the estimated duration, in seconds, of a run with this many iterations and without evaluations."""
        return self.first_seconds + (iterations - 1) * self.iteration_seconds

    def disk_bytes(self, iterations: int) -> int:
        """Return the estimated disk usage of a run with this many iterations, packed but not thinned."""
        packed = SIZE * max(0, (iterations - MARGIN) // SIZE)
        arrays = self.start_bytes + iterations * self.array_bytes
        records = packed * self.record_bytes // _RECORDS_PACKED + (iterations - packed) * self.record_bytes
        log = min(iterations * self.log_bytes, (1 + OLDER_FILES) * MOST_BYTES)
        return arrays + records + (iterations - packed) * self.table_bytes + log


class UsageSampler:
    """Measures the cost of a run's first iterations."""

    def __init__(self) -> None:
        self._ends, self._first = [0.0], (0, Counter[str]())

    def add(self, run: Run, report: IterationReport) -> None:
        self._ends.append(report.elapsed_seconds)
        if self.iterations == 1:
            self._first = report.iteration, _sizes(run)

    @property
    def iterations(self) -> int:
        """Number of measured iterations."""
        return len(self._ends) - 1

    def sample(self, run: Run) -> Sample:
        """Return the measurements; requires at least two iterations."""
        (iteration, first), last = self._first, _sizes(run)
        each = Counter({kind: max(0, last[kind] - first[kind]) // (self.iterations - 1) for kind in last})
        arrays, tables, log = each.pop("data.zarr", 0), each.pop("tables", 0), each.pop(FOLDER, 0)
        records = each.total()
        seconds = [end - began for began, end in zip(self._ends, self._ends[1:], strict=False)]
        start = first.total() - (iteration + 1) * (arrays + tables + log + records)
        return Sample(
            iterations=self.iterations,
            memory_bytes=most_memory(resource.RUSAGE_SELF),
            first_seconds=seconds[0],
            iteration_seconds=median(seconds[1:]),
            start_bytes=max(start, 0),
            array_bytes=arrays,
            table_bytes=tables,
            record_bytes=records,
            log_bytes=log,
        )


def _sizes(run: Run) -> Counter[str]:
    """Return the sizes of a run's top-level folders in bytes, keyed by name."""
    sizes = Counter[str]()
    for path, num_bytes in run.files.sizes().items():
        sizes[path.partition("/")[0]] += num_bytes
    return sizes


@dataclass(frozen=True)
class Usage:
    """Peak memory and training time of a run over all its sessions; `sample` is None if too little was measured."""

    memory_bytes: int = 0
    seconds: float = 0.0
    sample: Sample | None = None


def read_usage(path: Path) -> Usage | None:
    """Return a run's recorded usage, or None if it was not recorded, as in earlier versions."""
    try:
        document = json.loads(read_file(path / FOLDER / NAME, limit=_LARGEST))
        found = document["sample"]
        sample = found and Sample(**{name: type_(found[name]) for name, type_ in Sample.__annotations__.items()})
        return Usage(int(document["memory_bytes"]), float(document["seconds"]), sample)
    except (OSError, StoreError, ValueError, KeyError, TypeError, RecursionError):
        return None


@contextmanager
def kept_usage(run: Run, iterations: int, observer: Observer) -> Iterator[Observer]:
    """Yield an observer that also records a run's usage, ignoring write errors; `iterations` is the target number."""
    if iterations >= SIZE + MARGIN:  # packing imports this module later, so include it in the measured memory
        import metaloom.storage.write.packed_tables  # noqa: F401 # pyright: ignore[reportUnusedImport]
    before, sampler, began = read_usage(run.path) or Usage(), UsageSampler(), time.perf_counter()
    enough = max(2, min(10, iterations // 2))
    usage, written = before, began

    def write() -> None:
        nonlocal usage, written
        written = time.perf_counter()
        memory = max(before.memory_bytes, most_memory(resource.RUSAGE_SELF))
        usage = replace(usage, memory_bytes=memory, seconds=before.seconds + written - began)
        with suppress(OSError, StoreError):
            folder = operator_folder(run.path)
            part = folder / f"{NAME}.part"
            part.write_text(json.dumps(asdict(usage)), "utf-8")
            os.replace(part, folder / NAME)

    def iteration_done(report: IterationReport) -> None:
        nonlocal usage
        if usage.sample is None:
            sampler.add(run, report)
            if sampler.iterations == enough:
                usage = replace(usage, sample=sampler.sample(run))
        if time.perf_counter() - written > _WRITE_EVERY_SECONDS:
            write()
        observer.iteration_done(report)

    try:
        yield replace(observer, iteration_done=iteration_done)
    finally:
        write()


def most_memory(who: int) -> int:
    """Return the peak memory in bytes of this process (RUSAGE_SELF) or of its largest ended child."""
    return resource.getrusage(who).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

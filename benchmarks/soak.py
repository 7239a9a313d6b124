"""Costs of very many tiny commits: latency, memory and open files stay as they begin, one line per block.

    python benchmarks/soak.py [--commits N] [--blocks N] [--folder FOLDER]

Each commit is one output of a few hundred bytes, flushed before the next, so that its latency is all there is to see.
"""

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from metaloom import storage
from metaloom.pipeline.types import TaskBatch
from metaloom.storage import RunWriter, StageRef


@dataclass(frozen=True)
class Block:
    """Measurements over some commits.

    Attributes:
        commits: committed so far.
        median_ms, slowest_ms: wall time from `put` to the end of `flush`; the 99th percentile for `slowest_ms`.
        cpu_ms: processor time per commit.
        memory_mb: resident memory of the process.
        open_files: file descriptors of the process.
    """

    commits: int
    median_ms: float
    slowest_ms: float
    cpu_ms: float
    memory_mb: float
    open_files: int


def main() -> None:
    """Print a table with a line per block, then what opening and verifying the result takes."""
    arguments = _arguments()
    folder = Path(tempfile.mkdtemp(prefix="soak-", dir=arguments.folder))
    try:
        print("  commits  median ms   99 % ms  CPU ms  memory MB  open files")
        for block in soak(folder / "run", commits=arguments.commits, blocks=arguments.blocks):
            print(
                f"{block.commits:9}{block.median_ms:11.2f}{block.slowest_ms:10.2f}{block.cpu_ms:8.2f}"
                f"{block.memory_mb:11.1f}{block.open_files:12}",
                flush=True,
            )
        _report_reading(folder / "run")
    finally:
        shutil.rmtree(folder)


def soak(path: Path, *, commits: int, blocks: int) -> Iterator[Block]:
    """Commit tiny outputs to a new run; yields what each block of them took."""
    size, done = commits // blocks, 0
    with storage.create_run(path, capacity=commits, config={}, config_digest="", environment={}) as writer:
        for _ in range(blocks):
            cpu = time.process_time()
            seconds = [_commit(writer, i) for i in range(done, done + size)]
            cpu, done = time.process_time() - cpu, done + size
            yield Block(
                commits=done,
                median_ms=1e3 * statistics.median(seconds),
                slowest_ms=1e3 * float(np.quantile(seconds, 0.99)),
                cpu_ms=1e3 * cpu / size,
                memory_mb=_memory_mb(),
                open_files=len(os.listdir("/proc/self/fd")),
            )


def _commit(writer: RunWriter, i: int) -> float:
    tasks = TaskBatch(np.full((4, 2), float(i)), np.full(4, -1), ("x", "y"), ("m", "m"))
    began = time.perf_counter()
    writer.put(StageRef(i, "sample_tasks"), tasks, inputs=[], seed_position=[i], started=0.0, seconds=0.0)
    writer.flush()
    return time.perf_counter() - began


def _memory_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def _report_reading(path: Path) -> None:
    began = time.perf_counter()
    refs = storage.open_run(path).refs()
    print(f"listing {len(refs)} outputs: {time.perf_counter() - began:.2f} s")
    began = time.perf_counter()
    storage.open_run(path)[len(refs) - 1].tasks()
    print(f"opening and reading the last one: {1e3 * (time.perf_counter() - began):.1f} ms")
    began = time.perf_counter()
    storage.open_writer(path).close()
    print(f"opening for writing, all records checked: {time.perf_counter() - began:.1f} s")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commits", type=int, default=100_000, help="in all")
    parser.add_argument("--blocks", type=int, default=10, help="lines of the table")
    parser.add_argument(
        "--folder", type=Path, default=None, help="where to write; the system's temporary folder if not given"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()

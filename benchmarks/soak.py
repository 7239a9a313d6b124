"""Costs of very many tiny iterations: latency, memory and open files stay as they begin, one line per block.

    python benchmarks/soak.py [--iterations N] [--blocks N] [--folder FOLDER] [--keep]

An iteration has the seven outputs of an on-policy one, each of a few hundred bytes and flushed before the next, so that
the latency of a commit is all there is to see. Old iterations are packed meanwhile, as in training.
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
from metaloom.pipeline.types import EpisodeBatch, LearnerState, Samples, TaskBatch, TaskParams, Update
from metaloom.storage import RunWriter, StageRef
from metaloom.storage.format.codec import Value


@dataclass(frozen=True)
class Block:
    """Measurements over some commits.

    Attributes:
        iterations: complete so far.
        median_ms, slowest_ms: wall time from `put` to the end of `flush`; the 99.9th percentile for `slowest_ms`.
        cpu_ms: processor time per commit, packing included.
        memory_mb: resident memory of the process.
        open_files: file descriptors of the process.
    """

    iterations: int
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
        print("iterations  median ms  99.9% ms  CPU ms  memory MB  open files")
        for block in soak(folder / "run", iterations=arguments.iterations, blocks=arguments.blocks):
            print(
                f"{block.iterations:10}{block.median_ms:11.2f}{block.slowest_ms:11.2f}{block.cpu_ms:8.2f}"
                f"{block.memory_mb:11.1f}{block.open_files:12}",
                flush=True,
            )
        _report_reading(folder / "run")
    finally:
        if arguments.keep:
            print(f"kept: {folder / 'run'}")
        else:
            shutil.rmtree(folder)


def soak(path: Path, *, iterations: int, blocks: int) -> Iterator[Block]:
    """Store tiny iterations in a new run; yields what each block of them took."""
    size, done = iterations // blocks, 0
    with storage.create_run(path, capacity=iterations, config={}, config_digest="", environment={}) as writer:
        _commit(writer, StageRef(0, "initialize"), Update(_learner(0), {}), [])
        for _ in range(blocks):
            cpu = time.process_time()
            seconds = [s for i in range(done, done + size) for s in _iteration(writer, i)]
            cpu, done = time.process_time() - cpu, done + size
            yield Block(
                iterations=done,
                median_ms=1e3 * statistics.median(seconds),
                slowest_ms=1e3 * float(np.quantile(seconds, 0.999)),
                cpu_ms=1e3 * cpu / len(seconds),
                memory_mb=_memory_mb(),
                open_files=len(os.listdir("/proc/self/fd")),
            )


def _iteration(writer: RunWriter, i: int) -> list[float]:
    tasks = StageRef(i, "sample_tasks")
    batch = TaskBatch(np.full((4, 2), float(i)), np.full(4, -1), ("x", "y"), ("m", "m"))
    seconds = [_commit(writer, tasks, batch, [writer.run.learner_ref(i)])]
    seconds += _rollouts(writer, i, 0)
    adapted = TaskParams({"w": np.full((4, 8), i, np.float32)})
    seconds.append(_commit(writer, StageRef(i, "adapt"), adapted, [StageRef(i, "process_samples")]))
    seconds += _rollouts(writer, i, 1)
    update = Update(_learner(i + 1), {"loss": float(i), "return": 0.0})
    return [*seconds, _commit(writer, writer.run.last_ref(i), update, [StageRef(i, "process_samples", 1)])]


def _rollouts(writer: RunWriter, i: int, k: int) -> list[float]:
    rollouts, samples = StageRef(i, "collect_rollouts", k), StageRef(i, "process_samples", k)
    episodes = _episodes(i)
    processed = Samples(episodes.rewards, episodes.rewards, episodes.rewards, episodes.mask)
    return [
        _commit(writer, rollouts, episodes, [StageRef(i, "sample_tasks")]),
        _commit(writer, samples, processed, [rollouts]),
    ]


def _commit(writer: RunWriter, ref: StageRef, value: Value, inputs: list[StageRef]) -> float:
    began = time.perf_counter()
    writer.put(ref, value, inputs=inputs, seed_position=[ref.iteration], started=0.0, seconds=0.0)
    writer.flush()
    return time.perf_counter() - began


def _episodes(i: int) -> EpisodeBatch:
    rewards = np.full((4, 1, 3), i, np.float32)
    return EpisodeBatch(
        observations=np.zeros((4, 1, 4, 2), np.float32),
        actions=np.zeros((4, 1, 3, 2), np.float32),
        rewards=rewards,
        terminated=np.zeros((4, 1), bool),
        truncated=np.ones((4, 1), bool),
        lengths=np.full((4, 1), 3, np.int32),
        behavior={"mean": np.zeros((4, 1, 3, 2), np.float32), "log_std": np.zeros((4, 2), np.float32)},
        reward_terms={},
        initial_state=np.zeros((4, 1, 2)),
    )


def _learner(i: int) -> LearnerState:
    return LearnerState({"w": np.full(8, i, np.float32)})


def _memory_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def _report_reading(path: Path) -> None:
    folders = [(len(names) + len(folders), folder) for folder, folders, names in os.walk(path)]
    count = sum(len(names) for _, _, names in os.walk(path))
    largest, where = max(folders)
    print(f"{count} files, {largest} entries in the largest folder, {Path(where).relative_to(path)}")
    for what, act in {
        "opening for reading": lambda: len(storage.open_run(path)),
        "opening for writing": lambda: storage.open_writer(path).close(),
        "reading the first and the last tasks": lambda: [storage.open_run(path)[i].tasks() for i in (0, -1)],
        "metrics of all iterations": lambda: storage.open_run(path).metrics(),
        "verification": lambda: storage.verify_run(path),
    }.items():
        began = time.perf_counter()
        act()
        print(f"{what}: {time.perf_counter() - began:.2f} s, memory {_memory_mb():.0f} MB", flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=100_000, help="in all")
    parser.add_argument("--keep", action="store_true", help="keep the run and tell where it is")
    parser.add_argument("--blocks", type=int, default=10, help="lines of the table")
    parser.add_argument(
        "--folder", type=Path, default=None, help="where to write; the system's temporary folder if not given"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()

"""What reading one task of a run costs, and what writing runs so that this is cheap costs: shards beside whole chunks.

    python benchmarks/reading_parts.py [--iterations 200] [--folder FOLDER]

Two runs of half-cheetah's size are written in turns, one in format metaloom/1, whose arrays have a chunk per iteration,
and one in metaloom/2, whose chunks are shards with a part per task. Then both are read in turns. Bytes are those that
the process asked the system for, records and metadata included; a task's own bytes are its share of the stored arrays.
"""

import argparse
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import numpy as np
from store import PAPER, put, written_iteration

from metaloom import storage
from metaloom.pipeline.types import Update
from metaloom.storage.format.records import FORMATS

TASK = 7
ITERATION_READS = 15


def main() -> None:
    """Print both formats beside each other."""
    arguments = _arguments()
    folder = Path(tempfile.mkdtemp(prefix="parts-benchmark-", dir=arguments.folder))
    try:
        runs = _write(folder, arguments.iterations)
        _compare_whole(runs)
        _compare_parts(runs)
    finally:
        shutil.rmtree(folder)


def _write(folder: Path, iterations: int) -> dict[str, storage.Run]:
    rng, writers, seconds = np.random.default_rng(0), dict[str, storage.RunWriter](), defaultdict(list)
    for name in FORMATS:
        with patch("metaloom.storage.write.creation.FORMATS", (name,)):
            writers[name] = storage.create_run(
                folder / name, capacity=iterations, config={}, config_digest="", environment={}
            )
    # A few different ones are enough, and making one takes longer than writing it.
    kept = [list(written_iteration(rng, i, PAPER)) for i in range(4)]
    for i in range(iterations):
        outputs = [
            (storage.StageRef(i, ref.stage, ref.step), value, [_moved(to, ref.iteration, i) for to in inputs])
            for ref, value, inputs in kept[i % 4]
        ]
        for name in FORMATS if i % 2 else FORMATS[::-1]:
            if i == 0:
                learner = next(value for _, value, _ in outputs if isinstance(value, Update))
                put(writers[name], [(storage.StageRef(0, "initialize"), Update(learner.learner, {}), [])])
            began = time.perf_counter(), time.process_time()
            put(writers[name], outputs)
            writers[name].flush()
            seconds[name].append((time.perf_counter() - began[0], time.process_time() - began[1]))
    for writer in writers.values():
        writer.close()
    _report(f"write an iteration ({iterations} in turns)", {name: times[1:] for name, times in seconds.items()})
    return {name: storage.open_run(folder / name) for name in FORMATS}


def _moved(ref: storage.StageRef, old: int, new: int) -> storage.StageRef:
    if ref.stage == "initialize" or (ref.iteration < old and new == 0):
        return storage.StageRef(0, "initialize")
    return storage.StageRef(ref.iteration - old + new, ref.stage, ref.step)


def _compare_whole(runs: dict[str, storage.Run]) -> None:
    seconds = defaultdict(list)
    for n in range(2 * ITERATION_READS):
        for name in FORMATS if n % 2 else FORMATS[::-1]:
            iteration = runs[name][n % len(runs[name])]
            began = time.perf_counter(), time.process_time()
            for k in (0, 1):
                iteration.rollouts(k)
                iteration.samples(k)
            iteration.adapted(0)
            seconds[name].append((time.perf_counter() - began[0], time.process_time() - began[1]))
    _report("read a whole iteration", seconds)


def _compare_parts(runs: dict[str, storage.Run]) -> None:
    count = len(runs[FORMATS[0]])
    for columns in (["observation"], ["reward"], None):
        print(f"one task, {count} iterations, steps=0, columns={columns}")
        for name, run in runs.items():
            own = _own_bytes(run, columns)
            read, wall, cpu = _measured(lambda run=run, columns=columns: _all(run, columns))
            print(
                f"  {name}  {read / 1e6:8.1f} MB read, {read / own:5.2f} x its own, {wall:6.2f} s wall {cpu:6.2f} s CPU"
            )
    for what, read in {
        "one batch of one task, rollouts(0, task=7)": lambda run: run[3].rollouts(0, task=TASK),
        "one episode, steps(3, steps=0, task=7, episode=2)": lambda run: run.steps(3, steps=0, task=TASK, episode=2),
    }.items():
        print(what)
        for name, run in runs.items():
            asked, wall, _ = _measured(lambda read=read, run=run: read(run))
            print(f"  {name}  {asked / 1e6:8.2f} MB read, {1e3 * wall:6.1f} ms")


def _all(run: storage.Run, columns: list[str] | None) -> None:
    for _ in run.scan_steps(columns=columns, steps=0, task=TASK):
        pass


def _own_bytes(run: storage.Run, columns: list[str] | None) -> float:
    """The stored bytes of a task in all iterations."""
    wanted = [f"rollouts_0/{name}s" for name in columns or ()]
    stages = ("collect_rollouts", "process_samples")
    chunks = [c for i in run.iterations for stage in stages for c in run.record(storage.StageRef(i, stage)).chunks]
    left_out = ("initial_state", "mask", "log_std")  # which are no columns
    sizes = [c.size for c in chunks if (c.array in wanted if wanted else not c.array.endswith(left_out))]
    return sum(sizes) / PAPER.tasks


def _measured(read: Callable[[], object]) -> tuple[int, float, float]:
    """Bytes that were asked for, seconds of wall time and of CPU."""
    before, began = _bytes_read(), (time.perf_counter(), time.process_time())
    read()
    return _bytes_read() - before, time.perf_counter() - began[0], time.process_time() - began[1]


def _bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split("rchar:")[1].split()[0])


def _report(what: str, seconds: dict[str, list[tuple[float, float]]]) -> None:
    print(f"{what}, medians in ms")
    medians = {
        name: [1e3 * statistics.median(column) for column in zip(*times, strict=True)]
        for name, times in seconds.items()
    }
    base = medians[FORMATS[0]]
    for name, (wall, cpu) in medians.items():
        ratios = f"x {FORMATS[0]}: wall {wall / base[0]:5.2f}  cpu {cpu / base[1]:5.2f}"
        print(f"  {name}  wall {wall:7.1f}  cpu {cpu:7.1f}   {ratios}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=200, help="of each run")
    parser.add_argument(
        "--folder", type=Path, default=None, help="where to write; the system's temporary folder if not given"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()

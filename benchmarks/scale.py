"""Model of an iteration's time with many workers: `python benchmarks/scale.py --workers 10 100 1000`.

1. Small runs of a recipe on this machine give the seconds of every stage and the bytes of every batch, per task, and
   what the writer takes for an iteration and for a task of it.
2. A real Dask scheduler hands out shards, cut as a training cuts them. The workers are threads of at most ten Dask
   workers. They sleep for as long as it takes and send results of their size back through loopback sockets. Scheduler,
   workers and trainer share one process, so what a round takes beyond the sleep is more than separate machines need.
3. The sum is an iteration with a task per worker, 40 at least, with the mathematics in the trainer, on one core. What
   takes most of it binds first.
"""

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from distributed import Client, LocalCluster

from metaloom import storage
from metaloom.flows.commands.train import train
from metaloom.flows.recipes import load_settings
from metaloom.flows.rollouts.dask import tasks_per_shard
from metaloom.flows.rollouts.workers import Backend, usable_cores
from metaloom.pipeline.config.input import override
from metaloom.pipeline.config.run import RunConfig, build_config
from metaloom.pipeline.types import Array, EpisodeBatch, TaskParams
from metaloom.storage import StageRef
from metaloom.storage.format.codec import flatten

LOOPBACK = "127.0.0.1"


def main() -> None:
    args = _arguments()
    config = build_config(override(load_settings(args.recipe), [f"num_tasks={args.tasks}", "iterations=3"]))
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        costs = Costs.measured(config, Path(folder))
    rounds = config.algorithm.adaptation_steps + 1
    print(
        f"{args.recipe}, per task and iteration on one core: {costs.rollouts:.3f} s of rollouts, "
        f"{costs.learning:.4f} s of mathematics, {1e3 * costs.writer_per_task:.1f} ms of the writer, besides "
        f"{costs.writer:.2f} s of it; {costs.received / 1e6:.2f} MB of episodes back, "
        f"{costs.sent / 1e3:.0f} kB of parameters out"
    )
    print("workers | tasks | rollouts | their transfer | mathematics | writer")
    for workers in args.workers:
        tasks = max(40, workers)
        size = tasks_per_shard(tasks, costs.rollouts / rounds)
        shards, shard = -(-tasks // size), size * costs.rollouts / rounds
        turns = -(-shards // workers)
        with _cluster(workers) as client:
            taken = _best(client, shards, shard, size * costs.received // rounds, size * costs.sent // rounds)
        row = [
            rounds * turns * shard,
            rounds * (taken - turns * shard),
            tasks * costs.learning,
            costs.writer + tasks * costs.writer_per_task,
        ]
        print(f"{workers:>7} | {tasks:>5} | " + " | ".join(f"{value:.2f} s" for value in row), flush=True)


@dataclass(frozen=True)
class Costs:
    """Seconds and bytes of an iteration, per task on one core.

    Attributes:
        rollouts: of all rounds.
        learning: seconds of processing, adapting and the update.
        writer: seconds for an iteration, whatever its tasks.
        writer_per_task: seconds.
        received: bytes of episodes.
        sent: bytes of a task's parameters, in all rounds.
    """

    rollouts: float
    learning: float
    writer: float
    writer_per_task: float
    received: int
    sent: int

    @classmethod
    def measured(cls, config: RunConfig, folder: Path) -> "Costs":
        """Train a run, and one of four times its tasks for the writer."""
        small, large = (_trained(config, times, folder) for times in (1, 4))
        seconds, received, sent = _per_task(small, config)
        writers = [_writer_seconds(run) for run in (small, large)]
        per_task = max(0.0, (writers[1] - writers[0]) / (3 * config.num_tasks))
        rounds = config.algorithm.adaptation_steps + 1
        return cls(
            rollouts=seconds["collect_rollouts"],
            learning=sum(seconds[stage] for stage in ("process_samples", "adapt", "meta_optimize")),
            writer=max(0.0, writers[0] - per_task * config.num_tasks),
            writer_per_task=per_task,
            received=rounds * received,
            sent=rounds * sent,
        )


def _trained(config: RunConfig, times: int, folder: Path) -> storage.Run:
    larger = config.model_copy(update={"num_tasks": times * config.num_tasks})
    train(larger, folder / f"run-{times}", backend=Backend(workers=0))
    return storage.open_run(folder / f"run-{times}")


def _per_task(run: storage.Run, config: RunConfig) -> tuple[dict[str, float], int, int]:
    """Core-seconds of the last iteration by stage, bytes of a round's episodes and of its parameters, per task."""
    seconds: dict[str, float] = defaultdict(float)
    last = run.iterations[-1]
    refs = [ref for ref in run.refs() if ref.iteration == last]
    # Rollouts ran on one core; the learner's stages share their tasks among all.
    for ref in refs:
        cores = 1 if ref.stage == "collect_rollouts" else usable_cores()
        seconds[ref.stage] += cores * run.record(ref).seconds / config.num_tasks
    episodes, params = run[last].rollouts(0), run.load(StageRef(last, "adapt", 0))
    assert isinstance(episodes, EpisodeBatch)
    assert isinstance(params, TaskParams)
    size = sum(array.nbytes for array in flatten(episodes).values())
    sent = sum(array.nbytes for array in params.params.values())
    return seconds, size // config.num_tasks, sent // config.num_tasks


def _writer_seconds(run: storage.Run) -> float:
    """Seconds to keep an iteration: the first one once more, in a run of its own whose arrays exist already."""
    outputs = sorted((run.record(ref) for ref in run.refs() if ref.iteration < 2), key=lambda record: record.sequence)
    began = 0.0
    with (
        tempfile.TemporaryDirectory(dir=run.path.parent) as folder,
        storage.create_run(
            Path(folder) / "copy", config=run.config, config_digest="", capacity=2, environment={}, stages=run.stages
        ) as writer,
    ):
        for record in outputs:
            if record.ref.iteration == 1 and not began:
                writer.flush()
                began = time.perf_counter()
            value, inputs = run.load(record.ref), [record.ref for record in record.inputs]
            writer.put(record.ref, value, inputs=inputs, seed_position=(), started=0.0, seconds=0.0)
        writer.flush()
        return time.perf_counter() - began


@contextmanager
def _cluster(workers: int) -> Iterator[Client]:
    """A scheduler, and as many threads as workers are meant: a task costs the scheduler the same, whoever runs it."""
    with (
        LocalCluster(
            n_workers=min(workers, 10),
            threads_per_worker=-(-workers // min(workers, 10)),
            memory_limit=0,
            processes=False,
            protocol="tcp://",
            host=LOOPBACK,
            dashboard_address=None,  # pyright: ignore[reportArgumentType] - its stub forgets that None means none
            worker_dashboard_address=None,
        ) as cluster,
        Client(cluster) as client,
    ):
        client.wait_for_workers(min(workers, 10))
        yield client


def _best(client: Client, number: int, seconds: float, received: int, sent: int) -> float:
    """Seconds of the best of three turns: submit so many tasks, gather them all."""
    taken = []
    for _ in range(3):
        began = time.perf_counter()
        argument = np.zeros(sent, np.uint8)
        futures = [client.submit(_task, argument, seconds, received, pure=False) for _ in range(number)]
        client.gather(futures)
        taken.append(time.perf_counter() - began)
    return min(taken)


def _task(argument: Array, seconds: float, size: int) -> Array:
    del argument
    time.sleep(seconds)
    return np.zeros(size, np.uint8)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="promp-half-cheetah-dir")
    parser.add_argument("--tasks", type=int, default=10, help="of the run that is measured")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 10, 40, 100, 400, 1000])
    parser.add_argument("--folder", type=Path, default=None, help="where runs are written")
    return parser.parse_args()


if __name__ == "__main__":
    main()

"""Model of an iteration's time with many workers: `python benchmarks/scale.py --workers 10 100 1000`.

1. A small run of a recipe on this machine gives the seconds of every stage and the bytes of every batch, per task.
2. A real Dask scheduler hands out a shard per worker. The workers, threads of at most ten Dask workers, sleep for as
   long as a rollout takes and send a batch of its size back through loopback sockets. Scheduler, workers and trainer
   share one process, so what a round takes beyond the sleep is more than separate machines would need.
3. The sum of both is an iteration with one task per worker, 40 at least. What takes most of it binds first.
"""

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import tempfile
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
from distributed import Client, LocalCluster

from metaloom import storage
from metaloom.flows.commands.train import train
from metaloom.flows.recipes import load_settings
from metaloom.flows.rollouts.workers import Backend, usable_cores
from metaloom.pipeline.config.input import override
from metaloom.pipeline.config.run import RunConfig, build_config
from metaloom.pipeline.types import Array, EpisodeBatch, TaskParams
from metaloom.storage import StageRef
from metaloom.storage.format.codec import flatten

LOOPBACK = "127.0.0.1"


def main() -> None:
    args = _arguments()
    settings = override(load_settings(args.recipe), [f"num_tasks={args.tasks}", "iterations=3"])
    config = build_config(settings)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        train(config, Path(folder) / "run", backend=Backend(workers=0))
        seconds, received, sent = _per_task(storage.open_run(Path(folder) / "run"), config)
    rounds = config.algorithm.adaptation_steps + 1
    print(
        f"{args.recipe}, per task and iteration on one core: {seconds['collect_rollouts']:.3f} s of rollouts, "
        f"{seconds['process_samples'] + seconds['adapt'] + seconds['meta_optimize']:.4f} s of all other stages; "
        f"{rounds * received / 1e6:.2f} MB of episodes back, {rounds * sent / 1e3:.0f} kB of parameters out"
    )
    head = ("workers", "tasks", "rollouts", "Dask and transfer", "processing", "adapt", "meta_optimize", "writer")
    print(" | ".join(head))
    for workers in args.workers:
        tasks = max(40, workers)
        per_worker = -(-tasks // workers)
        shard = per_worker * seconds["collect_rollouts"] / rounds
        round_trip = _round_trip(workers, shard, per_worker * received, per_worker * sent)
        learner = [tasks * seconds[stage] for stage in ("process_samples", "adapt", "meta_optimize")]
        row = [rounds * shard, rounds * (round_trip - shard), *learner, tasks * seconds["writer"]]
        print(f"{workers:>7} | {tasks:>5} | " + " | ".join(f"{value:.2f} s" for value in row), flush=True)


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
    seconds["writer"] = _writer_seconds(run) / config.num_tasks
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


def _round_trip(workers: int, shard_seconds: float, received: int, sent: int) -> float:
    """Seconds of the best of three rounds: submit a shard per worker, gather them all."""
    with (
        LocalCluster(
            # As many threads as workers are meant: a task costs the scheduler the same, whoever runs it.
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
        taken = []
        for _ in range(3):
            began = time.perf_counter()
            params = np.zeros(sent, np.uint8)
            futures = [client.submit(_shard, params, shard_seconds, received, pure=False) for _ in range(workers)]
            client.gather(futures)
            taken.append(time.perf_counter() - began)
        return min(taken)


def _shard(params: Array, seconds: float, size: int) -> Array:
    del params
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

"""Whole iterations: where the time goes, what persistence and orchestration add, how far from the physics.

    python benchmarks/iteration.py
    python benchmarks/iteration.py --recipe promp-point-corner --no-prefect

Three copies of one run take turns, a few iterations each: batches kept in memory; in the store; in the store and every
stage a Prefect task. All compute the same numbers, so differences are what keeping and orchestrating cost. Between
turns the same physics runs open loop on the same cores. Ratios of medians are printed; seconds mean nothing elsewhere.
"""

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, cast

# One thread per process in BLAS, as `make train` sets it; before numpy is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import psutil
from sampling import open_loop

from metaloom import storage
from metaloom.flows.graph.loop import StageCall, direct, run_once
from metaloom.flows.graph.run_stages import stages_of
from metaloom.flows.graph.runner import Runner
from metaloom.flows.recipes import load_settings
from metaloom.flows.rollouts.workers import Backend, code_digest
from metaloom.pipeline.config.input import override
from metaloom.pipeline.config.run import RunConfig, build_config
from metaloom.pipeline.envs.wrappers import PolicyActions
from metaloom.storage import StageRef

OPEN_LOOP = "open-loop physics"
MEMORY, STORE, PREFECT = "batches in memory", "batches in the store", "store, Prefect tasks"


class MemoryWriter:
    """Keeps what a run stores in a dictionary: the run without persistence."""

    def __init__(self) -> None:
        # Where a batch with numbers that are not finite would be kept.
        self.run = SimpleNamespace(path=Path("in-memory"))
        self._values: dict[StageRef, Any] = {}

    def contains(self, ref: StageRef) -> bool:
        return ref in self._values

    def load(self, ref: StageRef) -> Any:
        return self._values[ref]

    def put(self, ref: StageRef, value: Any, **about: Any) -> None:
        del about
        # As the store does, forget what no later iteration reads.
        self._values = {r: v for r, v in self._values.items() if r.iteration >= ref.iteration - 1}
        self._values[ref] = value

    def flush(self) -> None:
        """Nothing is ever outstanding."""


def main() -> None:
    args = _arguments()
    settings = [*args.set, f"iterations={args.block * args.rounds}"]
    config = build_config(override(load_settings(args.recipe), settings))
    with tempfile.TemporaryDirectory() as folder:
        if args.prefect:
            with prefect_server(Path(folder)):
                measure = _as_flow(lambda call: compare(config, args, Path(folder), call))
                measure()
        else:
            compare(config, args, Path(folder), None)


def compare(config: RunConfig, args: argparse.Namespace, folder: Path, prefect_call: StageCall | None) -> None:
    """Let the variants take turns and print the ratios."""
    variants: dict[str, tuple[Any, StageCall]] = {
        MEMORY: (MemoryWriter(), direct),
        STORE: (_store(config, folder / "store"), direct),
    }
    if prefect_call is not None:
        variants[PREFECT] = (_store(config, folder / "prefect"), prefect_call)
    per_iteration: dict[str, list[float]] = defaultdict(list)
    by_stage: dict[str, list[float]] = defaultdict(list)
    peak = 0
    with stages_of(config, Backend(workers=args.workers)) as stages:
        memory = variants[MEMORY][0]
        _iteration(stages, memory, direct, 0, defaultdict(list))  # warms workers and caches
        limits = [_limit(config, stages, memory, k, args.workers) for k in range(config.algorithm.adaptation_steps + 1)]
        for turn in range(args.rounds):
            for _ in range(2):
                per_iteration[OPEN_LOOP].append(sum(_seconds(limit) for limit in limits))
            for name, (writer, call) in variants.items():
                began = time.perf_counter()
                for iteration in range(turn * args.block, (turn + 1) * args.block):
                    _iteration(stages, writer, call, iteration, by_stage if name == STORE else defaultdict(list))
                writer.flush()
                per_iteration[name].append((time.perf_counter() - began) / args.block)
                peak = max(peak, _memory())
    _report(config, args, per_iteration, by_stage, peak)
    for writer, _ in variants.values():
        if isinstance(writer, storage.RunWriter):
            writer.close()


def _iteration(stages: Runner, writer: Any, call: StageCall, iteration: int, by_stage: dict[str, list[float]]) -> None:
    seconds: dict[str, float] = {}
    for ref in stages.order(iteration):
        call(ref, stages.upstream(ref), partial(run_once, stages, writer, ref, seconds))
    for stage, took in seconds.items():
        by_stage[stage].append(took)


def _limit(config: RunConfig, stages: Runner, memory: MemoryWriter, k: int, threads: int) -> Callable[[], object]:
    episodes = memory.load(StageRef(0, "collect_rollouts", k))
    tasks = memory.load(StageRef(0, "sample_tasks", 0))
    return open_loop(cast(PolicyActions, stages.env), episodes, tasks, threads)


def _report(
    config: RunConfig,
    args: argparse.Namespace,
    per_iteration: dict[str, list[float]],
    by_stage: dict[str, list[float]],
    peak: int,
) -> None:
    cost = {name: median(values) for name, values in per_iteration.items()}
    limit, whole = cost[OPEN_LOOP], cost[PREFECT if PREFECT in cost else STORE]
    sampling = sum(median(took) for stage, took in by_stage.items() if stage.startswith("collect_rollouts"))
    print(f"{args.recipe}: {config.nominal_steps_per_iteration:,} steps per iteration, {args.workers} workers")
    for name, took in cost.items():
        print(f"  {name:24s} {took:7.3f} s per iteration   {took / limit:5.2f} x physics")
    print("stages, share of an iteration with the store:")
    for stage, took in by_stage.items():
        print(f"  {stage:24s} {median(took):7.3f} s   {median(took) / cost[STORE]:6.1%}")
    print(f"sampling runs at      {limit / sampling:6.2f} of open-loop physics")
    print(f"a whole iteration is  {whole / limit:6.2f} x open-loop physics")
    print(f"persistence           {_extra(per_iteration, STORE, MEMORY) / cost[STORE]:6.1%} of an iteration")
    if PREFECT in cost:
        print(f"orchestration         {1000 * _extra(per_iteration, PREFECT, STORE):6.1f} ms per iteration")
    print(f"peak memory           {peak / 2**30:6.2f} GiB resident, trainer and workers, all variants together")


def _extra(per_iteration: dict[str, list[float]], more: str, less: str) -> float:
    """Seconds that one variant takes longer than another: the median over turns, which a busy moment cannot shift."""
    return median(a - b for a, b in zip(per_iteration[more], per_iteration[less], strict=True))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="promp-half-cheetah-dir")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--block", type=int, default=2, help="iterations per turn")
    parser.add_argument("--rounds", type=int, default=9, help="turns of every variant")
    parser.add_argument("--no-prefect", dest="prefect", action="store_false")
    return parser.parse_args()


def _store(config: RunConfig, path: Path) -> storage.RunWriter:
    return storage.create_run(
        path,
        config=config.model_dump(mode="json"),
        config_digest=config.digest(),
        capacity=config.iterations,
        environment={"code": code_digest()},
    )


def _as_flow(work: Callable[[StageCall], None]) -> Callable[[], Any]:
    # Imported now, when the environment names the server.
    from prefect import flow

    from metaloom.flows.prefect_app.deployments import stage_tasks

    @flow(name="benchmark", log_prints=False)
    def benchmark() -> None:
        work(stage_tasks())

    return benchmark


@contextmanager
def prefect_server(folder: Path) -> Iterator[None]:
    """A Prefect server of its own, with the project's settings, on a free port of 127.0.0.1."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ |= {
        "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
        "PREFECT_HOME": str(folder / "prefect-home"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
    }
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        _wait_for_port(port, server)
        yield
    finally:
        server.terminate()
        server.wait()


def _wait_for_port(port: int, server: subprocess.Popen[bytes]) -> None:
    while server.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.2)
    raise SystemExit(f"the Prefect server ended with code {server.returncode}")


def _memory() -> int:
    """Resident bytes of this process and its workers; the Prefect server, also a child, is left out."""
    this = psutil.Process()
    family = [this, *this.children(recursive=True)]
    return sum(p.memory_info().rss for p in family if "prefect" not in " ".join(p.cmdline()[:4]))


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()

"""Cost of keeping one iteration of half-cheetah at the paper's size, beside `np.save` of the same arrays.

    python benchmarks/store.py [--rounds N] [--folder FOLDER]
    python benchmarks/store.py --reading [--iterations 1000]

Both are measured in turns in one process, because timings of one disk swing by a factor of two from minute to minute.

With --reading: what questions to a run of many small iterations take, each in a process of its own; and what the run
holds before and after thinning.
"""

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from metaloom import storage
from metaloom.pipeline.types import EpisodeBatch, LearnerState, Params, Samples, TaskBatch, TaskParams, Update
from metaloom.storage import StageRef
from metaloom.storage.format.codec import Value, flatten
from metaloom.storage.format.stages import ON_POLICY


class Sizes(NamedTuple):
    """Size of an iteration."""

    tasks: int
    episodes: int
    steps: int
    observation: int
    action: int
    hidden: int


PAPER = Sizes(40, 20, 100, 17, 6, 64)

Outputs = list[tuple[StageRef, Value, list[StageRef]]]


def main() -> None:
    """Print seconds per iteration of wall time and of CPU, reading times, and their ratios to `np.save`."""
    arguments = _arguments()
    folder = Path(tempfile.mkdtemp(prefix="store-benchmark-", dir=arguments.folder))
    try:
        if arguments.reading:
            _measure_reading(folder / "run", arguments.iterations)
        else:
            _measure(folder, arguments.rounds)
    finally:
        shutil.rmtree(folder)


def _measure(folder: Path, rounds: int) -> None:
    rng = np.random.default_rng(0)
    timings: dict[str, list[tuple[float, float]]] = {}
    first = Update(_learner(rng, PAPER), {})
    outputs: list[tuple[StageRef, Value, list[StageRef]]] = []
    run = folder / "run"
    with storage.create_run(run, capacity=rounds + 1, config={}, config_digest="", environment={}) as writer:
        put(writer, [(StageRef(0, "initialize"), first, [])])
        for i in range(rounds + 1):
            outputs = list(written_iteration(rng, i, PAPER))
            plain = folder / f"npy_{i}"
            steps: dict[str, Callable[[], object]] = {
                "np.save": lambda outputs=outputs, plain=plain: _save(outputs, plain),
                "put": lambda outputs=outputs: put(writer, outputs),
                "put + flush": writer.flush,
                "read": lambda i=i: writer.run.load(StageRef(i, "collect_rollouts", 0)),
                "np.load": lambda i=i, plain=plain: _load(plain, StageRef(i, "collect_rollouts", 0)),
            }
            _run(steps, timings if i else {})  # the first iteration creates the arrays
    _report(timings, outputs, folder)


_QUESTIONS = {
    "import storage, open": "len(run)",
    "one iteration's batch": "run[7].rollouts(0)",
    "one quantity, all iterations": "run.steps(columns=['iteration', 'reward'])",
    "episodes()": "run.episodes()",
    "metrics()": "run.metrics()",
}
_COLD = """
import sys, time
began = time.perf_counter(), time.process_time()
from metaloom import storage
from metaloom.storage.format.stages import ON_POLICY
run = storage.open_run(sys.argv[1])
opened = time.perf_counter(), time.process_time()
{question}
print(*(1e3 * (now - then) for now, then in zip((time.perf_counter(), time.process_time()), {since}, strict=True)))
"""


def _measure_reading(path: Path, iterations: int) -> None:
    """Times from a cold process, in ms; those of questions do not include opening the run."""
    sizes = Sizes(4, 5, 20, 2, 2, 8)
    rng = np.random.default_rng(0)
    with storage.create_run(path, capacity=iterations, config={}, config_digest="", environment={}) as writer:
        put(writer, [(StageRef(0, "initialize"), Update(_learner(rng, sizes), {}), [])])
        for i in range(iterations):
            put(writer, list(written_iteration(rng, i, sizes)))
    print(f"{iterations} small iterations, {_held(path) / 1e6:.1f} MB; medians of 5 processes, in ms")
    for name, question in _QUESTIONS.items():
        program = _COLD.format(question=question, since="began" if "open" in name else "opened")
        rows = [_ask(program, path) for _ in range(5)]
        wall, cpu = (statistics.median(column) for column in zip(*rows, strict=True))
        print(f"  {name:28} wall {wall:7.0f}  cpu {cpu:7.0f}")
    with storage.open_writer(path) as writer:
        writer.thin(i for i in range(iterations) if i % 10)
    print(f"thinned to every tenth iteration: {_held(path) / 1e6:.1f} MB")


def _ask(program: str, path: Path) -> list[float]:
    answer = subprocess.run([sys.executable, "-c", program, str(path)], check=True, capture_output=True, text=True)
    return [float(number) for number in answer.stdout.split()]


def _held(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def _run(steps: dict[str, Callable[[], object]], timings: dict[str, list[tuple[float, float]]]) -> None:
    for name, step in steps.items():
        wall, cpu = time.perf_counter(), time.process_time()
        step()
        timings.setdefault(name, []).append((time.perf_counter() - wall, time.process_time() - cpu))
    put = timings["put"][-1]
    flush = timings["put + flush"][-1]
    timings["put + flush"][-1] = (put[0] + flush[0], put[1] + flush[1])


def _report(timings: dict[str, list[tuple[float, float]]], outputs: Outputs, folder: Path) -> None:
    raw = sum(array.nbytes for _, value, _ in outputs for array in flatten(value).values())
    rounds = len(timings["np.save"])
    files = [file for file in (folder / "run").rglob("*") if file.is_file()]
    stored = sum(file.stat().st_size for file in files)
    print(f"one iteration: {raw / 1e6:.1f} MB of arrays, {stored / 1e6 / (rounds + 1):.1f} MB on disk, ", end="")
    print(f"{len(files) / (rounds + 1):.0f} files; medians of {rounds} rounds, in ms")
    medians = {
        name: tuple(statistics.median(column) * 1e3 for column in zip(*t, strict=True)) for name, t in timings.items()
    }
    for name, (wall, cpu) in medians.items():
        base = medians["np.load" if name in ("read", "np.load") else "np.save"]
        print(
            f"  {name:12} wall {wall:7.1f}  cpu {cpu:7.1f}   x np: wall {wall / base[0]:5.2f}  cpu {cpu / base[1]:5.2f}"
        )


def put(writer: storage.RunWriter, outputs: Outputs) -> None:
    for ref, value, inputs in outputs:
        writer.put(ref, value, inputs=inputs, seed_position=(ref.iteration, ref.step), started=time.time(), seconds=0.0)


def _save(outputs: Outputs, folder: Path) -> None:
    folder.mkdir()
    for ref, value, _ in outputs:
        for name, array in flatten(value).items():
            np.save(folder / f"{ref.stage}.{ref.step}.{name}.npy", array)


def _load(folder: Path, ref: StageRef) -> list[object]:
    return [np.load(file) for file in sorted(folder.glob(f"{ref.stage}.{ref.step}.*.npy"))]


def written_iteration(rng: np.random.Generator, i: int, n: Sizes) -> Iterator[tuple[StageRef, Value, list[StageRef]]]:
    learner = ON_POLICY.learner_ref(i)
    tasks = StageRef(i, "sample_tasks")
    yield tasks, TaskBatch(rng.random((n.tasks, 1)), np.full(n.tasks, -1), ("direction",), ("1",)), []
    acting = learner
    for k in range(2):
        rollouts, samples = StageRef(i, "collect_rollouts", k), StageRef(i, "process_samples", k)
        yield rollouts, _episodes(rng, n), [tasks, acting]
        yield (
            samples,
            Samples(
                returns=_walk(rng, n, ()),
                values=_walk(rng, n, ()),
                advantages=_walk(rng, n, ()),
                mask=np.ones((n.tasks, n.episodes, n.steps), np.float32),
            ),
            [rollouts],
        )
        if k == 0:
            acting = StageRef(i, "adapt", 0)
            yield (
                acting,
                TaskParams({name: _copies(p, n) for name, p in _params(rng, n).items()}),
                [learner, rollouts, samples],
            )
    metrics = {f"metric_{m}": float(m) for m in range(30)}
    yield StageRef(i, "meta_optimize"), Update(_learner(rng, n), metrics), [learner, StageRef(i, "process_samples", 1)]


def _episodes(rng: np.random.Generator, n: Sizes) -> EpisodeBatch:
    shape = (n.tasks, n.episodes)
    return EpisodeBatch(
        observations=_walk(rng, n, (n.observation,), 1),
        actions=_walk(rng, n, (n.action,)),
        rewards=_walk(rng, n, ()),
        terminated=np.zeros(shape, np.bool_),
        truncated=np.ones(shape, np.bool_),
        lengths=np.full(shape, n.steps, np.int32),
        behavior={"mean": _walk(rng, n, (n.action,)), "log_std": np.zeros((n.tasks, n.action), np.float32)},
        reward_terms={"run": _walk(rng, n, ()), "control": _walk(rng, n, ())},
        initial_state=rng.standard_normal((*shape, 2 * n.observation + 2)),
    )


def _walk(rng: np.random.Generator, n: Sizes, tail: tuple[int, ...], more_steps: int = 0) -> np.ndarray:
    """Smooth in time like a simulator's output, so that it compresses like it."""
    noise = rng.standard_normal((n.tasks, n.episodes, n.steps + more_steps, *tail), np.float32)
    return np.cumsum(noise * 0.1, axis=2, dtype=np.float32)


def _params(rng: np.random.Generator, n: Sizes) -> Params:
    sizes = [("hidden_0", n.observation, n.hidden), ("hidden_1", n.hidden, n.hidden), ("output", n.hidden, n.action)]
    params: Params = {}
    for name, rows, columns in sizes:
        params[f"mean_network.{name}.kernel"] = rng.standard_normal((rows, columns), np.float32)
        params[f"mean_network.{name}.bias"] = np.zeros(columns, np.float32)
    return params | {"log_std": np.zeros(n.action, np.float32)}


def _learner(rng: np.random.Generator, n: Sizes) -> LearnerState:
    params = _params(rng, n)
    moments = {f"{moment}.{name}": value for moment in ("mean", "variance") for name, value in params.items()}
    return LearnerState(params, {**moments, "count": np.array(1)}, {"env_steps": np.array(0)})


def _copies(value: np.ndarray, n: Sizes) -> np.ndarray:
    return np.repeat(value[None], n.tasks, axis=0)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reading", action="store_true", help="measure questions to a long run instead")
    parser.add_argument("--iterations", type=int, default=1000, help="with --reading: of how many iterations")
    parser.add_argument("--rounds", type=int, default=10, help="iterations to measure")
    parser.add_argument(
        "--folder", type=Path, default=None, help="where to write; the system's temporary folder if not given"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()

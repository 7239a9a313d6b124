"""What keeping one iteration of half-cheetah at the paper's size costs, beside `np.save` of the same arrays.

    python benchmarks/store.py [--rounds N] [--folder FOLDER]

Both are measured in turns in one process, because timings of one disk swing by a factor of two from minute to minute.
"""

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

import storage
from pipeline.types import EpisodeBatch, LearnerState, Params, Samples, TaskBatch, TaskParams, Update
from storage import StageRef
from storage.codec import Value, flatten

TASKS, EPISODES, STEPS, OBSERVATION, ACTION, HIDDEN = 40, 20, 100, 17, 6, 64

Outputs = list[tuple[StageRef, Value, list[StageRef]]]


def main() -> None:
    """Print seconds per iteration of wall time and of CPU, reading times, and their ratios to `np.save`."""
    arguments = _arguments()
    folder = Path(tempfile.mkdtemp(prefix="store-benchmark-", dir=arguments.folder))
    try:
        _measure(folder, arguments.rounds)
    finally:
        shutil.rmtree(folder)


def _measure(folder: Path, rounds: int) -> None:
    rng = np.random.default_rng(0)
    timings: dict[str, list[tuple[float, float]]] = {}
    first = Update(_learner(rng), {})
    config = {"config": {}, "config_digest": "", "environment": {}}
    with storage.create_run(folder / "run", capacity=rounds + 1, **config) as writer:
        _put(writer, [(StageRef(0, "initialize"), first, [])])
        for i in range(rounds + 1):
            outputs = list(_iteration(rng, i))
            plain = folder / f"npy_{i}"
            steps: dict[str, Callable[[], object]] = {
                "np.save": lambda outputs=outputs, plain=plain: _save(outputs, plain),
                "put": lambda outputs=outputs: _put(writer, outputs),
                "put + flush": writer.flush,
                "read": lambda i=i: writer.run.load(StageRef(i, "collect_rollouts", 0)),
                "np.load": lambda i=i, plain=plain: _load(plain, StageRef(i, "collect_rollouts", 0)),
            }
            _run(steps, timings if i else {})  # the first iteration creates the arrays
    _report(timings, outputs, folder)


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


def _put(writer: storage.RunWriter, outputs: Outputs) -> None:
    for ref, value, inputs in outputs:
        writer.put(ref, value, inputs=inputs, seed_position=(ref.iteration, ref.step), started=time.time(), seconds=0.0)


def _save(outputs: Outputs, folder: Path) -> None:
    folder.mkdir()
    for ref, value, _ in outputs:
        for name, array in flatten(value).items():
            np.save(folder / f"{ref.stage}.{ref.step}.{name}.npy", array)


def _load(folder: Path, ref: StageRef) -> list[object]:
    return [np.load(file) for file in sorted(folder.glob(f"{ref.stage}.{ref.step}.*.npy"))]


def _iteration(rng: np.random.Generator, i: int) -> Iterator[tuple[StageRef, Value, list[StageRef]]]:
    learner = storage.learner_ref(i)
    tasks = StageRef(i, "sample_tasks")
    yield tasks, TaskBatch(rng.random((TASKS, 1)), np.full(TASKS, -1), ("direction",), ("1",)), []
    acting = learner
    for k in range(2):
        rollouts, samples = StageRef(i, "collect_rollouts", k), StageRef(i, "process_samples", k)
        yield rollouts, _episodes(rng), [tasks, acting]
        yield (
            samples,
            Samples(*(_walk(rng, ()) for _ in range(3)), np.ones((TASKS, EPISODES, STEPS), np.float32)),
            [rollouts],
        )
        if k == 0:
            acting = StageRef(i, "adapt", 0)
            yield (
                acting,
                TaskParams({name: _copies(p) for name, p in _params(rng).items()}),
                [learner, rollouts, samples],
            )
    metrics = {f"metric_{m}": float(m) for m in range(30)}
    yield StageRef(i, "meta_optimize"), Update(_learner(rng), metrics), [learner, StageRef(i, "process_samples", 1)]


def _episodes(rng: np.random.Generator) -> EpisodeBatch:
    shape = (TASKS, EPISODES)
    return EpisodeBatch(
        observations=_walk(rng, (OBSERVATION,), STEPS + 1),
        actions=_walk(rng, (ACTION,)),
        rewards=_walk(rng, ()),
        terminated=np.zeros(shape, np.bool_),
        truncated=np.ones(shape, np.bool_),
        lengths=np.full(shape, STEPS, np.int32),
        behavior={"mean": _walk(rng, (ACTION,)), "log_std": np.zeros((TASKS, ACTION), np.float32)},
        reward_terms={"run": _walk(rng, ()), "control": _walk(rng, ())},
        initial_state=rng.standard_normal((*shape, 2 * OBSERVATION + 2)),
    )


def _walk(rng: np.random.Generator, tail: tuple[int, ...], steps: int = STEPS) -> np.ndarray:
    """Smooth in time like a simulator's output, so that it compresses like it."""
    noise = rng.standard_normal((TASKS, EPISODES, steps, *tail), np.float32)
    return np.cumsum(noise * 0.1, axis=2, dtype=np.float32)


def _params(rng: np.random.Generator) -> Params:
    sizes = [("hidden_0", OBSERVATION, HIDDEN), ("hidden_1", HIDDEN, HIDDEN), ("output", HIDDEN, ACTION)]
    params: Params = {}
    for name, rows, columns in sizes:
        params[f"mean_network.{name}.kernel"] = rng.standard_normal((rows, columns), np.float32)
        params[f"mean_network.{name}.bias"] = np.zeros(columns, np.float32)
    return params | {"log_std": np.zeros(ACTION, np.float32)}


def _learner(rng: np.random.Generator) -> LearnerState:
    params = _params(rng)
    moments = {f"{moment}.{name}": value for moment in ("mean", "variance") for name, value in params.items()}
    return LearnerState(params, {**moments, "count": np.array(1)}, {"env_steps": np.array(0)})


def _copies(value: np.ndarray) -> np.ndarray:
    return np.repeat(value[None], TASKS, axis=0)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="iterations to measure")
    parser.add_argument(
        "--folder", type=Path, default=None, help="where to write; the system's temporary folder if not given"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()

"""Minibatches of stored transitions: drawing them, gathering them from memory and from the store.

    python benchmarks/replay_buffer.py [--rows 1000000] [--rounds 200]

Gathering takes turns with `np.take` of the same rows of as large a matrix: what no gathering can do without. Ratios of
medians are printed; seconds mean nothing elsewhere.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

# One thread in BLAS, as `make train` sets it; before numpy is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np

from metaloom import storage
from metaloom.pipeline.algorithms.off_policy.settings import Filling, OffPolicyPlan
from metaloom.pipeline.dataflow.stage import At
from metaloom.pipeline.replay.buffer import ReplayBuffer, TransitionColumns
from metaloom.pipeline.replay.index import RowIndex, TaskIndex
from metaloom.pipeline.types import Array, EpisodeBatch, Minibatches
from metaloom.stages.sample_transitions import draw_transitions
from metaloom.storage import StageRef

COLUMNS = TransitionColumns(observation_size=20, action_size=8)
STEPS = 1000
GATHERED = {"SAC": (1, 256), "PEARL": (16, 256)}


def main() -> None:
    """Print what every part takes."""
    arguments = _arguments()
    rng = np.random.default_rng(0)
    _measure_appending()
    _measure_drawing()
    _measure_gathering(rng, arguments.rows)
    with tempfile.TemporaryDirectory(prefix="replay-buffer-benchmark-") as folder:
        _measure_reading(rng, Path(folder), arguments.rounds)


def _measure_appending() -> None:
    def append_all() -> None:
        tasks, rows = TaskIndex(), RowIndex()
        for i in range(10_000):
            tasks.append(i, [0], np.array([[STEPS]]), in_context=False)
            rows.append(np.array([[STEPS]]))

    print(f"both indexes: append a round of one episode {_seconds(append_all) / 10_000 * 1e6:.0f} us")


def _measure_drawing() -> None:
    """An iteration of PEARL: 2000 gradient steps of 16 of 100 tasks, 256 transitions and 100 of context of each."""
    index = TaskIndex()
    index.append(-1, range(100), np.full((100, 10), 200), in_context=True)
    for i in range(500):
        tasks = np.random.default_rng(i).permutation(100)[:5]
        for k in range(3):
            index.append(i, tasks, np.full((5, 2), 200), in_context=k < 2)
    plan = OffPolicyPlan(Filling("uniform"), (), None, 16, batch_size=256, context_size=100, memory_size=10**6)
    view, at = index.as_of(499), At(run_seed=0, iteration=499)
    draw = partial(draw_transitions, view, plan, at, range(100), num_updates=2000, max_updates=2000)
    seconds = median(_seconds(draw) for _ in range(5))
    print(f"draw 2000 x 16 x (256 + 100) rows: {seconds:.2f} s, {seconds / 2000 * 1e6:.0f} us per gradient step")


def _measure_gathering(rng: np.random.Generator, num_rows: int) -> None:
    buffer = ReplayBuffer(COLUMNS, cache_bytes=2 * num_rows * COLUMNS.row_bytes, max_rows=num_rows)
    episodes = _episodes(rng)
    reading = []
    for first in range(0, num_rows, STEPS):
        buffer.append(episodes.lengths)
        row = Minibatches(np.full((1, 1, 1), first), np.zeros((1, 1), np.int64))
        reading.append(_seconds(lambda row=row: next(buffer.minibatches(row, lambda number: episodes))))
    print(f"take in {STEPS} rows of {COLUMNS.width} numbers: {median(reading) * 1e6:.0f} us")
    # Not zeros: the system would give all of them one page, which never leaves the cache.
    matrix = np.ones((num_rows, COLUMNS.width), np.float32)
    for name, (K, N) in GATHERED.items():
        drawn = _drawn(rng, num_rows, (400, K, N))
        minibatches = buffer.minibatches(drawn, _nothing_stored)
        next(minibatches)  # the first one looks at all that were drawn
        gathering, taking = [], []
        for rows in drawn.rows[1:]:
            gathering.append(_seconds(lambda minibatches=minibatches: next(minibatches)))
            taking.append(_seconds(partial(np.take, matrix, rows.ravel(), axis=0)))
        gather, take = median(gathering) * 1e6, median(taking) * 1e6
        print(f"{name}: gather {K * N} rows {gather:.0f} us, np.take {take:.0f} us, ratio {gather / take:.2f}")


def _measure_reading(rng: np.random.Generator, folder: Path, rounds: int) -> None:
    """Gradient steps of a run that is resumed, with memory for all rows and for an eighth of them."""
    refs = [StageRef(i, "collect_rollouts") for i in range(rounds)]
    with storage.create_run(folder / "run", capacity=rounds, config={}, config_digest="", environment={}) as writer:
        for ref in refs:
            writer.put(ref, _episodes(rng), inputs=[], seed_position=[], started=time.time(), seconds=0.0)
    run = storage.open_run(folder / "run")
    num_rows = rounds * STEPS
    drawn = _drawn(rng, num_rows, (200, 1, 256))
    plain = _seconds(lambda: [run.load(ref) for ref in refs])
    print(f"read a stored round of {STEPS} rows: {plain / rounds * 1e3:.1f} ms")
    for name, share in (("all rows fit", 2.0), ("half of them fit", 1 / 2), ("an eighth fits", 1 / 8)):
        buffer = ReplayBuffer(COLUMNS, cache_bytes=int(share * num_rows * COLUMNS.row_bytes), max_rows=num_rows)
        for _ in refs:
            buffer.append(np.array([[STEPS]]))

        def steps(buffer: ReplayBuffer = buffer) -> int:
            return sum(1 for _ in buffer.minibatches(drawn, lambda number: run.experience(refs[number])))

        for times in ("first", "again"):
            seconds = _seconds(steps)
            print(
                f"resumed, {name}, {times}: {seconds / 200 * 1e6:.0f} us per gradient step of 256 rows, "
                f"{seconds / plain:.2f} of reading all {rounds} rounds once"
            )


def _drawn(rng: np.random.Generator, num_rows: int, shape: tuple[int, int, int]) -> Minibatches:
    return Minibatches(rng.integers(0, num_rows, shape), np.zeros(shape[:2], np.int64))


def _episodes(rng: np.random.Generator) -> EpisodeBatch:
    def numbers(*shape: int) -> Array:
        return rng.standard_normal(shape, dtype=np.float32)

    return EpisodeBatch(
        observations=numbers(1, 1, STEPS + 1, COLUMNS.observation_size),
        actions=numbers(1, 1, STEPS, COLUMNS.action_size),
        rewards=numbers(1, 1, STEPS),
        terminated=np.zeros((1, 1), bool),
        truncated=np.ones((1, 1), bool),
        lengths=np.full((1, 1), STEPS, np.int32),
        behavior={},
        reward_terms={},
        initial_state=np.zeros((1, 1, 0)),
    )


def _nothing_stored(number: int) -> EpisodeBatch:
    raise AssertionError(f"round {number} is in memory and yet was read")


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=10**6, help="transitions in memory that are gathered from")
    parser.add_argument("--rounds", type=int, default=200, help=f"stored rounds of {STEPS} transitions to read")
    return parser.parse_args()


if __name__ == "__main__":
    main()

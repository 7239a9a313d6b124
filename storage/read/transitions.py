"""Reading of an off-policy run's transitions by row number, from stored episodes.

Rows are the real steps of a run in collection order: the replay buffer's initial fill, then each rollout batch.
Locating rows needs only episode lengths, and only batches with requested rows are read.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from metaloom.pipeline.dataflow.refs import StageRef
from metaloom.pipeline.replay.index import Locations, RowIndex
from metaloom.pipeline.types import Array, Minibatches
from metaloom.storage.errors import StageMissing
from metaloom.storage.format.columns import column
from metaloom.storage.read.outputs import StoredOutputs


@dataclass(frozen=True)
class StoredRound:
    """Rows of a stored batch of episodes."""

    ref: StageRef
    task_ids: Array | None  # -1 for tasks from a distribution, [B] int64; None for the initial fill
    lengths: Array  # [B, E] int32


def stored_rounds(run: StoredOutputs) -> Iterator[StoredRound]:
    """Yield the stored batches of episodes in row order. Raises StageMissing if there is a gap."""
    stages = run.files.stages
    for ref in _collected(run):
        filled = ref.stage == stages.named("memory_fill")
        tasks = None if filled else stages.in_group("tasks", ref.iteration)
        ids = tasks and run.files.read_arrays(run.record(tasks), ("ids",))["tasks"]["ids"][0]
        yield StoredRound(ref, ids, run.lengths(ref))


def read_transitions(run: StoredOutputs, rows: Array) -> pa.Table:
    """Read the transitions with row indices `rows` [n], in the given order, and where each was collected.

    Raises StageMissing if a row is not stored, and ValueError if a row number is negative.
    """
    if rows.size and rows.min() < 0:
        raise ValueError(f"rows: got {rows.min()}; row numbers start at 0, and -1 means no row")
    rounds, index = _index(run, int(rows.max(initial=-1)))
    found = index.locate(rows)
    of_rows = [rounds[number] for number in found.rounds]
    ids = [None if r.task_ids is None else int(r.task_ids[b]) for r, b in zip(of_rows, found.b, strict=True)]
    columns: dict[str, Array | pa.Array] = {
        "row": rows.astype(np.int64),
        "iteration": np.array([round.ref.iteration for round in of_rows], np.int32),
        "stage": pa.array([round.ref.stage for round in of_rows], pa.string()),
        "step": np.array([round.ref.step for round in of_rows], np.int32),
        "task": found.b.astype(np.int32),
        "task_id": pa.array(ids, pa.int64()),
        "episode": found.e.astype(np.int32),
        "t": found.t.astype(np.int32),
        **_values(run, rounds, found),
    }
    return pa.table({name: v if isinstance(v, pa.Array) else column(v) for name, v in columns.items()})


def minibatch_table(run: StoredOutputs, batches: Minibatches, update: int, *, context: bool, chosen: slice) -> pa.Table:
    """Read the transitions of a gradient step, with columns for their positions in the minibatch.

    `context` selects the transitions for task inference instead; `chosen` is a slice of the K x N rows to read.
    """
    numbers = batches.context_rows if context else batches.rows
    if numbers is None:
        raise _nothing(run, "no context", "a run whose algorithm infers tasks from context", "Omit `context`")
    if not 0 <= update < batches.num_updates:
        found, required = f"no gradient step {update}", f"a step from 0 to {batches.num_updates - 1}"
        raise _nothing(run, found, required, "Choose one of them")
    K, N = numbers.shape[1:]
    place, n = (index.reshape(-1)[chosen] for index in np.indices((K, N)))
    found = read_transitions(run, numbers[update].reshape(-1)[chosen])
    position = {"place": place.astype(np.int32), "memory": batches.task_ids[update][place], "n": n.astype(np.int32)}
    columns = dict(zip(found.column_names, found.columns, strict=True))
    return pa.table({**{name: column(values) for name, values in position.items()}, **columns})


def _collected(run: StoredOutputs) -> list[StageRef]:
    """Return references to the outputs that contain rows, after checking that there are no gaps."""
    stages, refs = run.files.stages, run.refs()
    fill = [ref for ref in refs if ref.stage == stages.named("memory_fill")]
    rounds = [ref for ref in refs if ref.stage == stages.named("rollouts")]
    per_iteration = max((ref.step for ref in rounds), default=0) + 1
    if rounds and not fill and stages.named("memory_fill"):
        run.record(StageRef(0, stages.named("memory_fill")))  # raises StageMissing, listing what exists
    for n, ref in enumerate(rounds):
        expected = StageRef(n // per_iteration, ref.stage, n % per_iteration)
        if ref != expected:
            run.record(expected)
    return [*fill, *rounds]


def _index(run: StoredOutputs, last_row: int) -> tuple[list[StoredRound], RowIndex]:
    """Return the batches up to the one that contains `last_row`, and an index of their rows."""
    rounds: list[StoredRound] = []
    index = RowIndex()
    for found in stored_rounds(run):
        if rounds and index.num_rows > last_row:
            break
        rounds.append(found)
        index.append(found.lengths)
    if not rounds or last_row >= index.num_rows:
        required = f"a row from 0 to {index.num_rows - 1}" if index.num_rows else "a run with episodes"
        raise _nothing(run, f"no row {last_row}", required, "Rows number the run's real steps in collection order")
    return rounds, index


def _values(run: StoredOutputs, rounds: list[StoredRound], found: Locations) -> dict[str, Array]:
    # A table without rows still needs columns, taken from any batch.
    parts: list[dict[str, Array]] = []
    for number in np.unique(found.rounds) if found.rounds.size else [0]:
        episodes, chosen = run.experience(rounds[number].ref), found.rounds == number
        b, e, t = found.b[chosen], found.e[chosen], found.t[chosen]
        part = {
            "observation": episodes.observations[b, e, t],
            "action": episodes.actions[b, e, t],
            "reward": episodes.rewards[b, e, t],
            "next_observation": episodes.observations[b, e, t + 1],
            "terminated": episodes.terminated[b, e] & (t == episodes.lengths[b, e] - 1),
        }
        parts.append(part)
    order = np.argsort(np.argsort(found.rounds, kind="stable"), kind="stable")
    return {name: np.concatenate([part[name] for part in parts])[order] for name in parts[0]}


def _nothing(run: StoredOutputs, found: str, required: str, action: str) -> StageMissing:
    return StageMissing(run.files.root, found=found, required=required, action=action)

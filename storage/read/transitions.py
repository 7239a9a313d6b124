"""The transitions that an off-policy run learns from, by their row numbers, read from the episodes that hold them.

Rows are the real steps of a run in order of collection: what filled the memory, then round by round. To find them only
the lengths of episodes are read, and then only the batches that hold some of those that were asked for.
"""

# pyarrow ships no types: what it returns is unknown to pyright.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownParameterType=false, reportUnknownArgumentType=false, reportUnknownLambdaType=false

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from metaloom.pipeline.replay.index import Places, ReplayIndex, Round
from metaloom.pipeline.types import Array, Minibatches
from metaloom.storage.errors import StageMissing, damaged
from metaloom.storage.format.columns import column
from metaloom.storage.format.layout import group_of
from metaloom.storage.format.refs import StageRef

if TYPE_CHECKING:
    from metaloom.storage.iteration import Outputs

_FIELDS = ("observations", "actions", "rewards", "terminated", "lengths")


@dataclass(frozen=True)
class StoredRound:
    """What a stored batch of episodes says about the rows in it.

    Attributes:
        ref: the stage that collected it.
        task_ids: [B] int64, index of each task in a fixed set, -1 when it was drawn from a distribution; None for what
            filled the memory, whose tasks are not stored.
        lengths: [B, E] int32, steps in each episode.
    """

    ref: StageRef
    task_ids: Array | None
    lengths: Array


def stored_rounds(run: "Outputs") -> Iterator[StoredRound]:
    """Every stored batch of episodes, in the order in which their rows are numbered.

    Raises:
        StageMissing: a round is not stored although later ones are, whose rows would be counted wrongly.
        DamagedRun: a batch is not what was committed, or none of episodes.
    """
    for ref in _collected(run):
        yield StoredRound(ref, _task_ids(run, ref), stored_lengths(run, ref))


def stored_lengths(run: "Outputs", ref: StageRef) -> Array:
    """[B, E] int32, steps in each episode of a stored batch, of which nothing else is read.

    Raises:
        DamagedRun: it is not what was committed, or none of episodes.
    """
    (lengths,) = _read(run, ref, "lengths")
    T = run.files.spec(f"{group_of(ref)}/rewards").shape[2]
    if not (lengths.ndim == 2 and lengths.any() and lengths.min() >= 0 and lengths.max() <= T):
        raise damaged(run.files.record_path(ref), f"its lengths are not those of episodes of at most {T} steps")
    return lengths


def read_transitions(run: "Outputs", rows: Array) -> pa.Table:
    """Transitions with the place that each is from, one per row number, in the order of `rows` [n].

    Raises:
        StageMissing: a row is not stored.
        ValueError: a number is negative.
    """
    if rows.size and rows.min() < 0:
        raise ValueError(f"rows: found {rows.min()}; required numbers from 0 on. -1 marks the places of no row")
    rounds, index = _index(run, int(rows.max(initial=-1)))
    places = index.locate(rows)
    columns = _lineage(rounds, rows, places) | _values(run, rounds, places)
    return pa.table(
        {name: values if isinstance(values, pa.Array) else column(values) for name, values in columns.items()}
    )


def minibatch_table(run: "Outputs", batches: Minibatches, update: int, *, context: bool, chosen: slice) -> pa.Table:
    """The transitions that a gradient step learned from, with the place of each in the minibatch before its lineage.

    Args:
        run: the run.
        batches: the row numbers of an iteration.
        update: the gradient step, from 0.
        context: the transitions that tasks were inferred from instead.
        chosen: which of the K x N rows, in this order.

    Raises:
        StageMissing: there is no such gradient step, it has no context, or a row is not stored.
    """
    numbers = batches.context_rows if context else batches.rows
    if numbers is None:
        raise _nothing(run, "no context", "a run whose algorithm infers tasks from context", "Leave `context` out")
    if not 0 <= update < batches.num_updates:
        found, required = f"no gradient step {update}", f"a step from 0 to {batches.num_updates - 1}"
        raise _nothing(run, found, required, "Choose one of them")
    K, N = numbers.shape[1:]
    place, n = (index.reshape(-1)[chosen] for index in np.indices((K, N)))
    found = read_transitions(run, numbers[update].reshape(-1)[chosen])
    position = {"place": place.astype(np.int32), "memory": batches.task_ids[update][place], "n": n.astype(np.int32)}
    return pa.table({**{name: column(values) for name, values in position.items()}, **_columns_of(found)})


def _collected(run: "Outputs") -> list[StageRef]:
    """The stages that collected rows, none missing."""
    fill = [ref for ref in run.refs() if ref.stage == "fill_memory"]
    rounds = [ref for ref in run.refs() if ref.stage == "collect_rollouts"]
    per_iteration = max((ref.step for ref in rounds), default=0) + 1
    if rounds and not fill and run.files.last_stage == "update":
        run.record(StageRef(0, "fill_memory"))  # raises StageMissing with what is there
    for n, ref in enumerate(rounds):
        expected = StageRef(n // per_iteration, "collect_rollouts", n % per_iteration)
        if ref != expected:
            run.record(expected)
    return [*fill, *rounds]


def _task_ids(run: "Outputs", ref: StageRef) -> Array | None:
    if ref.stage == "fill_memory":
        return None
    (ids,) = _read(run, StageRef(ref.iteration, "sample_tasks"), "ids")
    return ids


def _index(run: "Outputs", last_row: int) -> tuple[list[StoredRound], ReplayIndex]:
    """The rounds up to the one with some row, and where their rows lie."""
    rounds: list[StoredRound] = []
    index = ReplayIndex()
    for found in stored_rounds(run):
        if rounds and index.num_rows > last_row:
            break
        rounds.append(found)
        round = Round(found.ref.iteration, found.ref.stage, found.ref.step)
        # Whose memory a row belongs to does not matter for where it lies.
        index.append(round, np.zeros(len(found.lengths), np.int64), found.lengths, in_context=False)
    if not rounds or last_row >= index.num_rows:
        required = f"a row from 0 to {index.num_rows - 1}" if index.num_rows else "a run with episodes"
        raise _nothing(run, f"no row {last_row}", required, "Rows number the run's real steps in order of collection")
    return rounds, index


def _lineage(rounds: list[StoredRound], rows: Array, places: Places) -> dict[str, Array | pa.Array]:
    found = [rounds[number] for number in places.rounds]
    refs = [round.ref for round in found]
    ids = [None if r.task_ids is None else int(r.task_ids[b]) for r, b in zip(found, places.b, strict=True)]
    return {
        "row": rows.astype(np.int64),
        "iteration": np.array([ref.iteration for ref in refs], np.int32),
        "stage": pa.array([ref.stage for ref in refs], pa.string()),
        "step": np.array([ref.step for ref in refs], np.int32),
        "task": places.b.astype(np.int32),
        "task_id": pa.array(ids, pa.int64()),
        "episode": places.e.astype(np.int32),
        "t": places.t.astype(np.int32),
    }


def _values(run: "Outputs", rounds: list[StoredRound], places: Places) -> dict[str, Array]:
    # A table without rows has the columns of any batch.
    numbers = np.unique(places.rounds) if places.rounds.size else [0]
    parts = [_values_of(run, rounds[number].ref, places, places.rounds == number) for number in numbers]
    order = np.argsort(np.argsort(places.rounds, kind="stable"), kind="stable")
    return {name: np.concatenate([part[name] for part in parts])[order] for name in parts[0]}


def _values_of(run: "Outputs", ref: StageRef, places: Places, chosen: Array) -> dict[str, Array]:
    observations, actions, rewards, terminated, lengths = _read(run, ref, *_FIELDS)
    b, e, t = places.b[chosen], places.e[chosen], places.t[chosen]
    return {
        "observation": observations[b, e, t],
        "action": actions[b, e, t],
        "reward": rewards[b, e, t],
        "next_observation": observations[b, e, t + 1],
        "terminated": terminated[b, e] & (t == lengths[b, e] - 1),
    }


def _read(run: "Outputs", ref: StageRef, *names: str) -> list[Array]:
    """Some arrays of an output, and nothing else of it."""
    (group,) = run.files.read_arrays(run.record(ref), names).values()
    return [group[name][0] for name in names]


def _columns_of(table: pa.Table) -> dict[str, pa.ChunkedArray]:
    return dict(zip(table.column_names, table.columns, strict=True))


def _nothing(run: "Outputs", found: str, required: str, action: str) -> StageMissing:
    return StageMissing(run.files.root, found=found, required=required, action=action)

"""Tables derived from an iteration as Parquet files: episodes, tasks, metrics and evaluations."""

import io
from collections.abc import Mapping

import numpy as np

from metaloom.pipeline.types import EACH_EPISODE, Array, Evaluation, Metrics, TaskBatch, fact_of_episodes

FACTS = "facts."  # name prefix of stored facts


Columns = Mapping[str, Array]
"""Columns of the episodes table, keyed by name, each [B, E]: return, length, termination, and facts per episode."""


def episode_columns(arrays: Mapping[str, Array]) -> Columns:
    """Return the episode columns of a batch, computed from `rewards`, `facts.*` and the per-episode arrays."""
    others = {name: arrays[name] for name in EACH_EPISODE if name in arrays}
    named = {"return": arrays["rewards"].sum(axis=2, dtype=np.float64), "length": others.pop("lengths"), **others}
    fact_names = (name for name in arrays if name.startswith(FACTS))
    facts = {name.removeprefix(FACTS): fact_of_episodes(arrays[name], named["length"]) for name in fact_names}
    return named | {f"fact_{name}": array for name, array in facts.items()}


def iteration_tables(
    iteration: int, tasks: TaskBatch | None, by_step: Mapping[int, Columns], metrics: Metrics
) -> dict[str, bytes]:
    """Return one iteration's Parquet files, keyed by table name. Tables without rows are omitted."""
    named = {name: np.array([metrics[name]], np.float64) for name in sorted(metrics)}
    files = {"metrics": _parquet({"iteration": np.array([iteration], np.int32), **named}, {})}
    units = _task_units(tasks) if tasks else {}
    if tasks is not None:
        numbers = {"iteration": np.full(len(tasks), iteration, np.int32), "task": np.arange(len(tasks), dtype=np.int32)}
        files["tasks"] = _parquet({**numbers, "id": tasks.ids, **_task_columns(tasks)}, units)
    if by_step:
        parts = [episode_rows(iteration, k, episodes, tasks) for k, episodes in by_step.items()]
        columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        files["episodes"] = _parquet(columns, units | {"length": "steps"})
    return files


def evaluation_file(iteration: int, evaluation: Evaluation) -> bytes:
    """Return a Parquet file with the columns of `evaluation_columns`."""
    return _parquet(evaluation_columns(iteration, evaluation), _task_units(evaluation.tasks) | {"length": "steps"})


def evaluation_columns(iteration: int, evaluation: Evaluation) -> dict[str, Array]:
    """Return columns with one row per episode of an evaluation: adaptation episodes, then test episodes."""
    parts: list[dict[str, Array]] = []
    for kind in ("adaptation", "test"):
        returns = getattr(evaluation, f"{kind}_returns")
        facts: Mapping[str, Array] = getattr(evaluation, f"{kind}_facts")
        task, k, episode = (index.reshape(-1).astype(np.int32) for index in np.indices(returns.shape))
        part = {
            "iteration": np.full(returns.size, iteration, np.int32),
            "updates": np.full(returns.size, iteration + 1, np.int32),
            "test": np.full(returns.size, kind == "test"),
            "task": task,
            "adaptation_steps": k,
            "episode": episode,
            "return": returns.reshape(-1),
            "length": getattr(evaluation, f"{kind}_lengths").reshape(-1),
            "terminated": getattr(evaluation, f"{kind}_terminated").reshape(-1),
            **{f"fact_{name}": values.reshape(-1) for name, values in sorted(facts.items())},
            **{name: np.ascontiguousarray(column[task]) for name, column in _task_columns(evaluation.tasks).items()},
        }
        parts.append(part)
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _task_units(tasks: TaskBatch) -> dict[str, str]:
    return {f"task_{name}": unit for name, unit in zip(tasks.names, tasks.units, strict=True)}


def episode_rows(iteration: int, k: int, episodes: Columns, tasks: TaskBatch | None) -> dict[str, Array]:
    """Return the rows of the episodes table for one batch, with the parameters of each episode's task."""
    B, E = episodes["return"].shape
    repeated = {name: np.repeat(column, E) for name, column in _task_columns(tasks).items()} if tasks else {}
    rows = {
        "iteration": np.full(B * E, iteration, np.int32),
        "step": np.full(B * E, k, np.int32),
        "task": np.repeat(np.arange(B, dtype=np.int32), E),
        "episode": np.tile(np.arange(E, dtype=np.int32), B),
        **{name: values.reshape(-1) for name, values in episodes.items()},
        **repeated,
    }
    real = rows["length"] > 0
    return rows if real.all() else {name: column[real] for name, column in rows.items()}


def _task_columns(tasks: TaskBatch) -> dict[str, Array]:
    return {f"task_{name}": np.ascontiguousarray(tasks.params[:, p]) for p, name in enumerate(tasks.names)}


def _parquet(columns: Mapping[str, Array], units: Mapping[str, str]) -> bytes:
    # Imported here because importing pyarrow takes 0.15 s, and reading arrays does not need it.
    import pyarrow as pa
    import pyarrow.parquet as pq

    from metaloom.storage.format.columns import column

    arrays = {name: column(values) for name, values in columns.items()}
    fields = [
        pa.field(name, array.type, metadata={"unit": units[name]} if name in units else None)
        for name, array in arrays.items()
    ]
    sink = io.BytesIO()
    pq.write_table(pa.table(list(arrays.values()), schema=pa.schema(fields)), sink, compression="zstd")
    return sink.getvalue()

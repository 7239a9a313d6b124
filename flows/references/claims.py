"""Claims of a run that no output digest covers: its tables, its environment, its records."""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import pyarrow as pa

from metaloom.flows.formatting import stage_name
from metaloom.flows.graph.run_stages import config_of, stages_of_run
from metaloom.flows.results.class_returns import classes_of
from metaloom.flows.rollouts.workers import Backend
from metaloom.pipeline.envs.answers import described_facts
from metaloom.pipeline.envs.facts import component_facts, env_facts
from metaloom.pipeline.envs.registry import make_env
from metaloom.pipeline.types import EpisodeBatch, Evaluation, TaskBatch, Update
from metaloom.storage import Run, Span, StageRef
from metaloom.storage.format.codec import Value, flatten
from metaloom.storage.format.records import Input
from metaloom.storage.read.frames import read_tables
from metaloom.storage.read.parquet import parse_table
from metaloom.storage.read.tables import Columns, episode_columns, evaluation_file, iteration_tables

_MAY_MOVE = "class"  # the module of an environment, from version to version


def false_facts(run: Run) -> Iterator[str]:
    """Yield the names of recorded facts of the environment that it declares otherwise today.

    Facts recorded by versions that know fewer are skipped.
    """
    config, classes = config_of(run), classes_of(run)
    env = make_env(config.env)
    declared = {
        "env": env_facts(config.env, env),
        "components": component_facts(env),
        "facts": described_facts(env),
        "task_classes": env.task_classes.facts() if env.task_classes is not None else {},
    }
    env.close()
    recorded = {name: run.info["environment"].get(name, {}) for name in ("env", "components", "facts")}
    if isinstance(recorded["env"], dict):
        recorded["env"] = {name: fact for name, fact in recorded["env"].items() if name != _MAY_MOVE}
    recorded["task_classes"] = {} if classes is None else classes.facts()
    yield from _differing(recorded, json.loads(json.dumps(declared)))
    # Every version omits names under which there is nothing to record.
    environments = [run.info["environment"], *(session.environment for session in run.sessions())]
    for name in ("components", "facts", "task_classes"):
        if declared[name] and any(name in recorded and not recorded[name] for recorded in environments):
            yield name


def _differing(recorded: Mapping[str, Any], declared: Mapping[str, Any], inside: str = "") -> Iterator[str]:
    for name, told in recorded.items():
        found = declared.get(name)
        # Classes go together: without one of them, the others have other tasks.
        if isinstance(told, dict) and isinstance(found, dict) and name != "task_classes":
            yield from _differing(cast(dict[str, Any], told), cast(dict[str, Any], found), f"{inside}{name}.")
        elif told != found and (told or inside):
            yield f"{inside}{name}"


def false_records(run: Run, iterations: Iterable[int]) -> Iterator[str]:
    """Yield contradictions between records of complete iterations and the stages that compute their outputs.

    Sums of spans are not compared; `storage.verify_run` does that.
    """
    with stages_of_run(run, Backend(workers=0)) as stages:
        for iteration in iterations:
            asked, stored = stages.order(iteration), run.refs_of([iteration])
            for ref in asked:
                if ref not in stored:
                    yield f"{_told(ref)}, which the settings ask for and is not stored"
                else:
                    record, runner = run.record(ref), stages.of(ref)
                    inputs = [each for each in runner.inputs(ref) if isinstance(each, StageRef)]
                    spans = [each for each in runner.inputs(ref) if isinstance(each, Span)]
                    is_true = {
                        "inputs": record.inputs == tuple(Input(each, run.record(each).digest) for each in inputs),
                        "spans": [item.span for item in record.spans] == spans,
                        "seed_position": record.seed_position == tuple(runner.seed_position(ref)),
                    }
                    if wrong := ", ".join(name for name, is_so in is_true.items() if not is_so):
                        yield f"{wrong} of {_told(ref)}"
            yield from (f"{_told(ref)}, for which the settings do not ask" for ref in stored if ref not in asked)


def _told(ref: StageRef) -> str:
    return f"{stage_name(ref)} of iteration {ref.iteration}"


class TableCheck:
    """Compares the tables of a run with outputs, which must be given in the order of their computation."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._tasks: TaskBatch | None = None
        self._rounds: dict[int, Columns] = {}
        self._loose: set[str] = set()

    def see(self, ref: StageRef, value: Value, *, identical: bool) -> Iterator[str]:
        """Yield the names of the tables that end with an output and contradict it.

        Args:
            ref: The output.
            value: Computed output.
            identical: False if the record says something else. Its tables then need only the same columns and units.
        """
        if isinstance(value, TaskBatch):
            self._tasks = value
            self._loose |= set() if identical else {"tasks", "episodes"}
        elif isinstance(value, EpisodeBatch) and ref.stage == self._run.stages.named("rollouts"):
            self._rounds[ref.step] = episode_columns(flatten(value))
            self._loose |= set() if identical else {"episodes"}
        elif isinstance(value, Evaluation):
            loose: set[str] = set() if identical else {"evaluations"}
            yield from self._false(ref.iteration, {"evaluations": evaluation_file(ref.iteration, value)}, loose)
        elif isinstance(value, Update) and ref.stage == self._run.stages.last:
            computed = iteration_tables(ref.iteration, self._tasks, self._rounds, value.metrics)
            loose = self._loose if identical else self._loose | {"metrics"}
            self._tasks, self._rounds, self._loose = None, {}, set()
            yield from self._false(ref.iteration, computed, loose)

    def _false(self, iteration: int, computed: Mapping[str, bytes], loose: Collection[str]) -> Iterator[str]:
        for name, raw in computed.items():
            stored = read_tables(self._run.files, name, [iteration])
            if not _agree(stored, parse_table(raw, Path(name)), values=name not in loose):
                yield name


def _agree(stored: pa.Table, computed: pa.Table, *, values: bool) -> bool:
    """Return True if a table holds exactly the computed rows, in the same units.

    Packed tables have the columns of other iterations too, without values.

    Args:
        stored: Table of the run.
        computed: Table from the computed values.
        values: False to compare names and units of the columns only.
    """
    more = {*stored.column_names} - {*computed.column_names}
    return (
        (stored.num_rows == computed.num_rows or not values)
        and all(stored[name].null_count == stored.num_rows for name in more)
        and all(
            name in stored.column_names
            and (not values or _values(stored[name]) == _values(computed[name]))
            and _unit(stored, name) == _unit(computed, name)
            for name in computed.column_names
        )
    )


def _unit(table: pa.Table, name: str) -> bytes | None:
    return (table.schema.field(name).metadata or {}).get(b"unit")


def _values(column: pa.ChunkedArray) -> list[object]:
    """Return the values of a column whatever type holds them, in which NaN equals itself."""
    return ["NaN" if value != value else value for value in column.to_pylist()]

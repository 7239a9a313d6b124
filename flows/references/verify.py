"""Verification of references: recompute an iteration and compare all outputs with their records."""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import pyarrow as pa

from metaloom import storage
from metaloom.flows.as_recorded import Arithmetic, arithmetic_of
from metaloom.flows.commands.replay import replay_from_learner
from metaloom.flows.errors import UsageError
from metaloom.flows.formatting import adaptation_returns, number, plural, stage_name
from metaloom.flows.graph.run_stages import config_of, stages_of_run
from metaloom.flows.results.class_returns import classes_of
from metaloom.flows.results.replay import StageReplay
from metaloom.flows.rollouts.workers import Backend
from metaloom.flows.runs import require_iteration
from metaloom.pipeline.envs.answers import described_facts
from metaloom.pipeline.envs.facts import component_facts, env_facts
from metaloom.pipeline.envs.registry import make_env
from metaloom.pipeline.types import EpisodeBatch, Evaluation, TaskBatch, Update
from metaloom.storage import Run, Span, StageRef
from metaloom.storage.errors import damaged
from metaloom.storage.format.codec import Value, flatten
from metaloom.storage.format.records import Input
from metaloom.storage.progress import Progress, unseen
from metaloom.storage.read.frames import read_tables
from metaloom.storage.read.parquet import parse_table
from metaloom.storage.read.tables import Columns, episode_columns, evaluation_file, iteration_tables


def false_facts(run: Run) -> Iterator[str]:
    """Yield the names of recorded facts about the environment that differ from the facts it declares today.

    Facts that an earlier version did not record are skipped.
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
    if isinstance(recorded["env"], dict):  # the module of an environment may change between versions
        recorded["env"] = {name: fact for name, fact in recorded["env"].items() if name != "class"}
    recorded["task_classes"] = {} if classes is None else classes.facts()
    yield from _differing(recorded, json.loads(json.dumps(declared)))
    # A section with nothing to record is omitted, so an empty one is wrong if there is something to record.
    environments = [run.info["environment"], *(session.environment for session in run.sessions())]
    for name in ("components", "facts", "task_classes"):
        if declared[name] and any(name in recorded and not recorded[name] for recorded in environments):
            yield name


def _differing(recorded: Mapping[str, Any], declared: Mapping[str, Any], inside: str = "") -> Iterator[str]:
    for name, was in recorded.items():
        found = declared.get(name)
        # Compare classes together, since each depends on the others.
        if isinstance(was, dict) and isinstance(found, dict) and name != "task_classes":
            yield from _differing(cast(dict[str, Any], was), cast(dict[str, Any], found), f"{inside}{name}.")
        elif was != found and (was or inside):
            yield f"{inside}{name}"


def false_records(run: Run, iterations: Iterable[int]) -> Iterator[str]:
    """Yield contradictions between the records of complete iterations and the stages that compute the outputs.

    Digests of spans are not compared, since `storage.verify_run` compares them.
    """
    with stages_of_run(run, Backend(workers=0)) as stages:
        for iteration in iterations:
            asked, stored = stages.order(iteration), run.refs_of([iteration])
            for ref in asked:
                if ref not in stored:
                    yield f"{_name_of(ref)}, which the settings request and which is not stored"
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
                        yield f"{wrong} of {_name_of(ref)}"
            yield from (f"{_name_of(ref)}, which the settings do not request" for ref in stored if ref not in asked)


def _name_of(ref: StageRef) -> str:
    return f"{stage_name(ref)} of iteration {ref.iteration}"


class TableCheck:
    """Check of a run's tables against recomputed outputs, which must be passed in the order of computation."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._tasks: TaskBatch | None = None
        self._rounds: dict[int, Columns] = {}
        self._loose: set[str] = set()

    def see(self, ref: StageRef, value: Value, *, identical: bool) -> Iterator[str]:
        """Yield the names of the tables that an output completes, if their stored values differ from the computed ones.

        If the output is not `identical` to its record, its tables only need equal columns and units.
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
    """Return True if a stored table contains exactly the computed rows, in the same units.

    Packed tables may also contain columns that only other iterations use, which are null here. If `values` is False,
    only the names and units of columns are compared.
    """
    more = {*stored.column_names} - {*computed.column_names}
    # A column without metadata has no unit.
    was, now = ({f.name: (f.metadata or {}).get(b"unit") for f in table.schema} for table in (stored, computed))
    return all(stored[name].null_count == stored.num_rows for name in more) and all(
        name in stored.column_names
        and (not values or _values(stored[name]) == _values(computed[name]))
        and was[name] == now[name]
        for name in computed.column_names
    )


def _values(column: pa.ChunkedArray) -> list[object]:
    """Return the values of a column, with NaN replaced by text so that NaNs compare equal."""
    return ["NaN" if value != value else value for value in column.to_pylist()]


@dataclass(frozen=True)
class Verified:
    """Result of recomputing an iteration of a reference from the nearest stored learner."""

    name: str
    iteration: int
    start: int  # first recomputed iteration, whose learner was stored
    stages: int  # number of compared stages in all iterations from `start` to `iteration`
    proved: str  # meaning of equality on this kind of device, in words
    first_difference: StageRef | None = None  # first stage whose output differs; None if all are equal
    differs: tuple[str, ...] = ()  # versions and processor facts that have changed
    returns: tuple[float, float] | None = None  # recorded and recomputed average return, after any adaptation
    # Tables that differ from the computed ones; if an output differs, only their columns and units are compared.
    false_tables: tuple[str, ...] = ()
    false_facts: tuple[str, ...] = ()  # recorded facts about the environment that differ today, such as `facts`
    false_records: tuple[str, ...] = ()  # records whose inputs, seed positions or existence contradict the stages
    arithmetic: Arithmetic | None = None  # CPU code paths used and, if they are not the recorded ones, the reason

    @property
    def identical(self) -> bool:
        """True if every output is bitwise identical to the recorded one and there are no contradictions."""
        return self.first_difference is None and not (self.false_tables or self.false_facts or self.false_records)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "identical": self.identical}

    def __str__(self) -> str:
        """Return a summary of the result, followed by the CPU code paths used."""
        return f"{self._outcome()}\n{self.arithmetic}" if self.arithmetic else self._outcome()

    def _outcome(self) -> str:
        about = f"{self.name}@{self.iteration}: {plural(self.stages, 'stage')} recomputed from learner {self.start}"
        # There may be hundreds of differences.
        records, more = [*self.false_records[:3]], len(self.false_records) - 3
        records += [f"and {more} more"] if more > 0 else []
        wrong = {"its tables of": self.false_tables, "what it records of its environment:": self.false_facts}
        wrong["its records:"] = tuple(records)
        places = [f"in {where} {', '.join(names)}" for where, names in wrong.items() if names]
        if self.first_difference is None and places:
            return (
                f"{about}: all {self.proved}, but NOT recorded correctly by the run, {' and '.join(places)}: `show`, "
                "`report` and `compare` show values that differ from the computed ones"
            )
        if self.first_difference is None:
            earned = f"; the average return of iteration {self.iteration} is "
            return f"{about}: all {self.proved}" + (f"{earned}{number(self.returns[1])}" if self.returns else "")
        where = f"iteration {self.first_difference.iteration}, {stage_name(self.first_difference)}"
        far = ""
        if self.returns is not None:
            then, now = self.returns
            far = f"; the average return of iteration {self.iteration} is {now:.8g}, recorded {then:.8g}"
        false = f". In addition, the run is not recorded correctly {' and '.join(places)}" if places else ""
        if not self.differs:
            return (
                f"{about}: NOT identical from {where} on{far}. Versions and processor match the record, so the "
                f"fault lies with this machine, the reference or Metaloom{false}"
            )
        return (
            f"{about}: not identical from {where} on{far}. Identical results are only guaranteed with the same "
            f"versions and type of processor. Changed since: {'; '.join(self.differs)}{false}"
        )


def verify(
    path: Path, iteration: int | None, *, backend: Backend = Backend(workers=0), on_progress: Progress = unseen
) -> Verified:
    """Recompute an iteration of a reference (None: all) from the nearest stored learner, and compare all outputs."""
    run = storage.open_run(path)
    if iteration is None:
        # Also check files that recomputing does not read.
        for damage in storage.verify_run(path):
            raise damaged(path / damage.file, damage.problem)
    first, iteration = (0, max(len(run.iterations) - 1, 0)) if iteration is None else (None, iteration)
    require_iteration(run, iteration)
    if iteration not in run.iterations:
        raise UsageError(
            f"{run.location}: iteration {iteration} is incomplete; choose a complete one (there "
            f"are {len(run.iterations)})"
        )
    tables, outcomes = TableCheck(run), list[StageReplay]()
    metrics: Mapping[str, float] = {}
    false_tables: dict[str, None] = {}
    for outcome, value in replay_from_learner(path, iteration, first=first, backend=backend):
        outcomes.append(outcome)
        metrics = value.metrics if isinstance(value, Update) else metrics
        on_progress(outcome.ref.iteration, iteration)
        false_tables |= dict.fromkeys(tables.see(outcome.ref, value, identical=outcome.identical))
    assert outcomes, f"iteration {iteration} has no stage"
    start, different = outcomes[0].ref.iteration, next((each for each in outcomes if not each.identical), None)
    recorded, now = adaptation_returns(run[iteration].metrics()), adaptation_returns(metrics)
    return Verified(
        name=run.name,
        iteration=iteration,
        start=start,
        stages=len(outcomes),
        proved=outcomes[-1].proved,
        first_difference=different.ref if different else None,
        differs=different.changed if different else (),
        returns=(recorded[-1], now[-1]) if recorded and now else None,
        false_tables=tuple(false_tables),
        false_facts=tuple(false_facts(run)),
        false_records=tuple(false_records(run, range(start, iteration + 1))),
        arithmetic=arithmetic_of(run, range(start, iteration + 1)),
    )

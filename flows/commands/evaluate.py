"""Evaluation of a stored learner after the fact; training evaluates the same way as it goes."""

import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from metaloom import storage
from metaloom.flows.errors import UsageError
from metaloom.flows.estimate import check_sizes
from metaloom.flows.graph.run_stages import config_of, require_stored_sizes, stages_of
from metaloom.flows.results.evaluation import EvaluationOutcome
from metaloom.flows.rollouts.workers import Backend
from metaloom.flows.runs import check_seed, updates_at
from metaloom.pipeline.config.run import build_config
from metaloom.pipeline.config.yaml import parse
from metaloom.pipeline.envs.contract import TaskField
from metaloom.pipeline.envs.registry import make_env
from metaloom.pipeline.tasks.evaluation import tasks_are_new, tasks_drawn_from
from metaloom.pipeline.types import LearnerState, Update
from metaloom.stages.evaluate import Tested, unseen


def evaluate(
    path: Path,
    iteration: int | None = None,
    *,
    tasks: str | Sequence[Sequence[float]] | None = None,
    num_tasks: int | None = None,
    evenly_by: str | None = None,
    task_sampling: Literal["uniform", "balanced"] | None = None,
    adaptation_steps: int | None = None,
    episodes: int | None = None,
    test_episodes: int | None = None,
    deterministic: bool | None = None,
    remembered: Literal["as-tested", "drawn"] | None = None,
    seed: int | None = None,
    backend: Backend = Backend(workers=0),
    tested: Tested = unseen,
) -> EvaluationOutcome:
    """Adapt the learner that a run had after `iteration` updates to tasks, and test it after every step.

    What is None is as in the run's evaluation section, so that without any of them the outcome equals, bit for bit,
    what training stored about this learner.

    Args:
        path: the run's folder.
        iteration: updates the learner has had; all of them when None, or counted from the end when negative.
        tasks: held-out, train, a file of tasks (JSON, YAML or Parquet), or the tasks themselves.
        num_tasks: how many of them.
        evenly_by: task field by whose values to draw evenly.
        task_sampling: balanced: equally many of every class that the environment declares.
        adaptation_steps: K.
        episodes: per task, for every adaptation step.
        test_episodes: per task, after every number of steps.
        deterministic: whether test episodes take the most likely action; and those that tasks are inferred from.
        remembered: of a policy with a memory, whether episodes that it remembers do so too (as-tested) or are drawn.
        seed: which tasks and episodes are drawn; independent of every seed of training.
        backend: where rollouts run.
        tested: is shown the test episodes after each number of adaptation steps.

    Raises:
        UsageError, ConfigError, EnvError: what no evaluation of this run can be.
    """
    seed = None if seed is None else check_seed(seed)
    run = storage.open_run(path)
    updates = updates_at(run, iteration)
    learner = learner_after(run, updates)
    asked: dict[str, Any] = {
        "tasks": tasks,
        "num_tasks": num_tasks,
        "evenly_by": evenly_by,
        "task_sampling": task_sampling,
        "adaptation_steps": adaptation_steps,
        "episodes": episodes,
        "test_episodes": test_episodes,
        "deterministic": deterministic,
        "remembered": remembered,
        "seed": seed,
    }
    trained = config_of(run, run.learner_ref(updates))
    if isinstance(tasks, str) and tasks not in ("held-out", "train"):
        with closing(make_env(trained.env)) as env:
            asked["tasks"] = load_tasks(Path(tasks), env.task_fields)
    elif tasks is not None and not isinstance(tasks, str):
        asked["tasks"] = [list(map(float, task)) for task in tasks]
    given = {name: value for name, value in asked.items() if value is not None}
    section = {**trained.evaluation.model_dump(mode="json"), **given, "every": None}
    config = build_config({**trained.model_dump(mode="json"), "evaluation": section})
    with stages_of(config, backend, partial(check_sizes, config, evaluation_alone=True)) as stages:
        require_stored_sizes(run, stages.context.learner)
        outcome = stages.evaluate(learner, updates, tested)
        env = stages.context.env
        new, drawn_from = tasks_are_new(config, env), tasks_drawn_from(config, env, updates)
        if new and run.info.get("ancestors"):
            # What a fork shares with its parent was drawn under the parent's settings.
            drawn = (run[i].tasks().params.tolist() for i in range(updates))
            new = {*map(tuple, outcome.task_params.tolist())}.isdisjoint(map(tuple, chain.from_iterable(drawn)))
        return EvaluationOutcome(updates, config, outcome, new, drawn_from, env.task_classes)


def learner_after(run: storage.Run, updates: int) -> LearnerState:
    """Read the learner that has had so many updates.

    Raises:
        UsageError: the run has had fewer.
    """
    ref = run.learner_ref(updates)
    if not run.contains(ref):
        raise UsageError(
            f"{run.path}: found {updates} updates asked for, but the run has {len(run.iterations)}; required no more. "
            f"`metaloom resume {storage.argument(run.path)} --iterations {updates}` makes more"
        )
    update = run.load(ref)
    assert isinstance(update, Update)
    return update.learner


def load_tasks(path: Path, fields: Sequence[TaskField]) -> list[list[float]]:
    """The tasks in a file, in its order: lists of numbers or mappings by field, or a column per field.

    Args:
        path: a .json, .yaml, .yml or .parquet file. Columns of Parquet may be called as in a run's tables, `task_*`.
        fields: of the environment's tasks.

    Raises:
        UsageError: there is no such file, or a row of it is no task of the environment.
    """
    if path.suffix not in (".json", ".yaml", ".yml", ".parquet"):
        hint = f"; did you mean --num-tasks {path}?" if str(path).isdigit() else ""
        raise UsageError(
            f"found tasks {str(path)!r}; required held-out, train, or a .json, .yaml or .parquet file{hint}"
        )
    try:
        if path.suffix == ".parquet":
            table, known = pq.read_table(path), {f"task_{field.name}": field.name for field in fields}
            # In a run's own tables the tasks stand beside other columns.
            if any(name in known for name in table.column_names):
                table = table.select([name for name in table.column_names if name in known])
            rows = table.rename_columns([known.get(name, name) for name in table.column_names]).to_pylist()
        else:
            rows = parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, pa.ArrowException) as error:
        raise UsageError(f"{path}: cannot be read as tasks: {error}") from None
    if not isinstance(rows, list) or not rows:
        raise UsageError(f"{path}: found {type(rows).__name__}; required a list of one task or more")
    return [_task(path, n, row, fields) for n, row in enumerate(rows)]


def _task(path: Path, n: int, row: Any, fields: Sequence[TaskField]) -> list[float]:
    names = [field.name for field in fields]
    if isinstance(row, Mapping):
        if {*row} != {*names}:
            raise UsageError(f"{path}: task {n} has the fields {sorted(map(str, row))}; required {names}")
        row = [row[name] for name in names]
    if not isinstance(row, list) or len(row) != len(names) or not all(map(_is_finite_number, row)):
        raise UsageError(f"{path}: found task {n} {row!r}; required {len(names)} finite numbers {names}")
    return [float(number) for number in row]


def _is_finite_number(value: Any) -> bool:
    # Compared with the largest float: an integer of any size is less than infinity.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max

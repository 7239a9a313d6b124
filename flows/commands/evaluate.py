"""Inputs and outputs of an evaluation besides its run: tasks from a file, and films of its unstored test episodes."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from metaloom.flows.errors import UsageError
from metaloom.flows.films.opengl import RendererName
from metaloom.flows.films.painters import drawable
from metaloom.flows.films.video import Film, Recording, check_film_file, described, film_of, median_episode
from metaloom.flows.formatting import plural
from metaloom.flows.results.evaluation import EvaluationOutcome
from metaloom.pipeline.config.yaml import parse
from metaloom.pipeline.envs.config import EnvConfig
from metaloom.pipeline.envs.contract import TaskField
from metaloom.pipeline.tasks.evaluation import EvaluationPlan
from metaloom.pipeline.types import EpisodeBatch
from metaloom.stages.evaluate import test_position


class EvaluationFilm:
    """Keeps the test episodes before the first adaptation step and after the last, and films one task.

    The task has the median return after adaptation. So do the episodes within the task.

    Args:
        out: File to write: .gif, .webp, .mp4, or .png for the last picture alone.
        env: Environment to film.
        renderer: Renderer for MuJoCo's robots.
    """

    def __init__(self, out: Path, env: EnvConfig, renderer: RendererName = "auto") -> None:
        check_film_file(out, "--video")
        drawable(env).close()
        self._out = out
        self._renderer: RendererName = renderer
        self._kept: dict[int, EpisodeBatch] = {}

    def tested(self, k: int, episodes: EpisodeBatch) -> None:
        """Keep the test episodes after k adaptation steps and the ones before adaptation; drop the others."""
        self._kept = {0: self._kept.get(0, episodes), k: episodes}

    def write(self, outcome: EvaluationOutcome, name: str) -> Film:
        """Film the evaluation of the run of this name."""
        returns, config = outcome.evaluation.test_returns[:, -1].mean(axis=1), outcome.config
        b = int(np.argsort(returns, kind="stable")[(len(returns) - 1) // 2])
        run_seed = EvaluationPlan.of(config).run_seed
        recordings = [
            Recording(config, test_position(run_seed, k), b, median_episode(episodes, b), outcome.tasks, episodes)
            for k, episodes in self._kept.items()
        ]
        caption = (
            f"{name} after {plural(outcome.updates, 'update')}, test task {b}{described(outcome.tasks, b)}, "
            "task and episodes of median return"
        )
        return film_of(recordings, self._out, caption, renderer=self._renderer, adapts=len(recordings) > 1)


def load_tasks(path: Path, fields: Sequence[TaskField]) -> list[list[float]]:
    """Load the tasks in a file, in its order. They are lists of values, mappings by field, or a column per field.

    Args:
        path: A .json, .yaml, .yml or .parquet file. Columns of Parquet may be called as in a run's tables, `task_*`.
        fields: Fields of the environment's tasks.
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

    def is_number(value: Any) -> bool:
        # Compared with the largest float: an integer of any size is less than infinity.
        return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max

    if isinstance(row, Mapping):
        if {*row} != {*names}:
            raise UsageError(f"{path}: task {n} has the fields {sorted(map(str, row))}; required {names}")
        row = [row[name] for name in names]
    if not isinstance(row, list) or len(row) != len(names) or not all(map(is_number, row)):
        raise UsageError(f"{path}: found task {n} {row!r}; required {len(names)} finite numbers {names}")
    return [float(number) for number in row]

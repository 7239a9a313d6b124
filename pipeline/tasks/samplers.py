"""Task samplers, which draw from a distribution or a pool, optionally evenly by a field or balanced by class."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from metaloom.pipeline.envs.answers import is_ctrl_c, last_line, own_traceback
from metaloom.pipeline.envs.contract import EnvError, MetaEnv, TaskField
from metaloom.pipeline.envs.task_classes import Classes
from metaloom.pipeline.seeding import generator
from metaloom.pipeline.types import Array, TaskBatch

_ATTEMPTS = 100
_BALANCED_ATTEMPTS = 1000


@dataclass(frozen=True)
class TaskDistribution:
    """Sampler for an environment's own task distribution that excludes the tasks in `seen`, [n, P]."""

    env: MetaEnv
    seen: Array

    def sample(self, num_tasks: int, rng: np.random.Generator, balanced_by: Classes | None = None) -> TaskBatch:
        """Draw `num_tasks` tasks that are not in `seen`, equally many per class if classes are given."""
        draw = partial(self._draw, rng=rng)
        tasks = draw(num_tasks) if balanced_by is None else balanced_draw(self.env, balanced_by, num_tasks, rng, draw)
        return task_batch(self.env.task_fields, tasks, np.full(num_tasks, -1))

    def _draw(self, num_tasks: int, rng: np.random.Generator) -> Array:
        seen = {tuple(task) for task in self.seen.tolist()}
        tasks = np.asarray(self.env.sample_tasks(num_tasks, rng), np.float64)
        for _ in range(_ATTEMPTS):
            again = [b for b, task in enumerate(tasks.tolist()) if tuple(task) in seen]
            if not again:
                return tasks
            tasks[again] = self.env.sample_tasks(len(again), rng)
        raise EnvError(
            f"{type(self.env.unwrapped).__name__}.sample_tasks almost always draws tasks that were seen in training; "
            "if there are finitely many, list all tasks in the environment's `task_set` and the held-out ones in "
            "`test_task_set`, or evaluate on tasks=train"
        )


@dataclass(frozen=True)
class TaskPool:
    """Sampler for a finite set of tasks [n, P], whose indices are their ids."""

    fields: tuple[TaskField, ...]
    tasks: Array
    with_replacement: bool = False  # False: draw random permutations of the pool

    @classmethod
    def of(cls, env: MetaEnv, tasks: Sequence[Sequence[float]]) -> "TaskPool":
        """Build a pool from an environment's task fields and a list of tasks."""
        return cls(env.task_fields, np.array(tasks, np.float64).reshape(len(tasks), -1 if tasks[0] else 0))

    def all(self) -> TaskBatch:
        """Return every task once, in order."""
        return self._batch(np.arange(len(self.tasks)))

    def sample(self, num_tasks: int, rng: np.random.Generator) -> TaskBatch:
        """Draw `num_tasks` tasks. Without replacement, no task repeats before the whole pool has been drawn."""
        n = len(self.tasks)
        if self.with_replacement:
            return self._batch(rng.integers(n, size=num_tasks))
        return self._batch(shuffled_blocks(n, num_tasks, rng))

    def sample_balanced(self, num_tasks: int, rng: np.random.Generator, classes: Classes) -> TaskBatch:
        """Draw `num_tasks` tasks in random order, equally many per class; none repeats until its class is used up."""
        of = classes.of(self.tasks, [field.name for field in self.fields])
        among, places = classes.among(of), list[Array]()
        for c, quota in zip(among, class_quotas(len(among), num_tasks, rng), strict=True):
            members = np.flatnonzero(of == c)
            if quota and not len(members):
                raise EnvError(
                    f"none of the {len(self.tasks)} tasks has the class {classes.names[c]!r}; balanced draws need "
                    "tasks of every class"
                )
            places.append(members[shuffled_blocks(len(members), quota, rng)])
        return self._batch(rng.permutation(np.concatenate(places)))

    def sample_evenly(self, num_tasks: int | None, rng: np.random.Generator, by: str) -> TaskBatch:
        """Draw `num_tasks` tasks (default: one per value), cycling through the values of a task field in order."""
        names = [field.name for field in self.fields]
        if by not in names:
            raise EnvError(f"no task field {by!r} to draw evenly by; use one of {names}")
        column = self.tasks[:, names.index(by)]
        members = [np.flatnonzero(column == value) for value in np.unique(column)]
        rounds, rest = (1, 0) if num_tasks is None else divmod(num_tasks, len(members))
        if rest:
            raise EnvError(
                f"cannot draw {num_tasks} tasks evenly from the {len(members)} values of {by}; use a multiple "
                f"of {len(members)}"
            )
        places = np.stack([group[shuffled_blocks(len(group), rounds, rng)] for group in members], axis=1).reshape(-1)
        return self._batch(places)

    def _batch(self, places: Array) -> TaskBatch:
        return task_batch(self.fields, self.tasks[places], places)


def draw_tasks(env: MetaEnv, *, num_tasks: int, run_seed: int, iteration: int, balanced: bool = False) -> TaskBatch:
    """Draw the meta-batch of an iteration: `num_tasks` independent draws from the env's task distribution.

    With `balanced`, every class is drawn the same number of times, by rejection. Raises EnvError if the env's
    `sample_tasks` fails or does not return finite values [B, P]; or, if balanced, if it declares no classes or one is
    almost never drawn.
    """
    rng = generator(run_seed, "tasks", iteration)
    draw = partial(_draw, env, rng=rng, iteration=iteration)
    classes = require_classes(env, "task_sampling") if balanced else None
    params = draw(num_tasks) if classes is None else balanced_draw(env, classes, num_tasks, rng, draw)
    places = {task: index for index, task in enumerate(env.task_set or ())}  # None: tasks are not limited to a set
    ids = np.array([places.get(tuple(task), -1) for task in params.tolist()], np.int64)
    return task_batch(env.task_fields, params, ids)


def _draw(env: MetaEnv, num_tasks: int, *, rng: np.random.Generator, iteration: int) -> Array:
    try:
        params = np.asarray(env.sample_tasks(num_tasks, rng), np.float64)
    except BaseException as error:
        if is_ctrl_c(error):
            raise
        raise EnvError(
            f"iteration {iteration}: {type(env.unwrapped).__name__}.sample_tasks raised {last_line(error)}\n"
            f"Its own traceback:\n{own_traceback(error).rstrip()}"
        ) from error
    names = tuple(field.name for field in env.task_fields)
    if params.shape != (num_tasks, len(names)) or not np.isfinite(params).all():
        raise EnvError(
            f"{type(env.unwrapped).__name__}.sample_tasks returned shape {params.shape}; "
            f"expected {(num_tasks, len(names))} finite numbers: one row per task, columns {names}"
        )
    return params


def class_quotas(num_classes: int, num_tasks: int, rng: np.random.Generator) -> list[int]:
    """Return the number of tasks to draw per class: equal, with the remainder going to random classes."""
    each, rest = divmod(num_tasks, num_classes)
    more = set(rng.permutation(num_classes)[:rest].tolist())
    return [each + (c in more) for c in range(num_classes)]


def balanced_draw(
    env: MetaEnv, classes: Classes, num_tasks: int, rng: np.random.Generator, draw: Callable[[int], Array]
) -> Array:
    """Draw tasks [B, P], equally many per class, without changing the distribution within each class.

    `draw` makes n independent draws [n, P], which are used in order; a draw from a class that is already complete is
    skipped. `rng` only selects the classes that get the remainder. Raises EnvError if a class is almost never drawn.
    """
    among, kept = classes.among(np.zeros(0, np.int64)), list[Array]()
    left = dict(zip(among.tolist(), class_quotas(len(among), num_tasks, rng), strict=True))
    names = [field.name for field in env.task_fields]
    for _ in range(_BALANCED_ATTEMPTS):
        tasks = draw(num_tasks)
        for task, c in zip(tasks, classes.of(tasks, names).tolist(), strict=True):
            if left.get(c):
                left[c] -= 1
                kept.append(task)
        if not any(left.values()):
            return np.stack(kept)
    rare = [classes.names[c] for c, missing in left.items() if missing]
    raise EnvError(
        f"{type(env.unwrapped).__name__}: too few tasks of the class {rare[0]!r} among "
        f"{_BALANCED_ATTEMPTS * num_tasks} draws; every class must occur. If some cannot, use task_sampling=uniform"
    )


def require_classes(env: MetaEnv, setting: str) -> Classes:
    """Return the task classes that an environment declares, or raise EnvError, since `setting` requires them."""
    if env.task_classes is None:
        raise EnvError(
            f"{setting} is balanced, but {type(env.unwrapped).__name__} declares no classes of tasks; use an "
            "environment with task_classes, such as half-cheetah-dir or a custom one that declares them, or "
            f"{setting}=uniform"
        )
    return env.task_classes


def distinct_tasks(env: MetaEnv, num_tasks: int, rng: np.random.Generator) -> TaskBatch:
    """Draw distinct tasks from `task_set` in random order; raise EnvError if there are fewer than `num_tasks`."""
    size = len(fixed_tasks(env))
    if num_tasks > size:
        raise EnvError(
            f"cannot draw {num_tasks} tasks from the {size} of {type(env.unwrapped).__name__}; "
            f"use at most {size}, since no task is drawn twice"
        )
    return TaskPool.of(env, fixed_tasks(env)).sample(num_tasks, rng)


def fixed_tasks(env: MetaEnv) -> tuple[tuple[float, ...], ...]:
    """Return the environment's `task_set`, or raise EnvError if there is none."""
    if env.task_set is None:
        raise EnvError(
            f"{type(env.unwrapped).__name__} draws its tasks from a distribution; use a fixed set of tasks "
            "(`task_set`), as in pearl-cheetah-vel"
        )
    return env.task_set


def shuffled_blocks(size: int, count: int, rng: np.random.Generator) -> Array:
    """Return `count` indices below `size`, taken from consecutive random permutations."""
    blocks = [rng.permutation(size) for _ in range(-(-count // size))]
    return np.concatenate(blocks or [np.zeros(0, np.int64)])[:count]


def task_batch(fields: tuple[TaskField, ...], tasks: Array, ids: Array) -> TaskBatch:
    """Return tasks [B, P] as a TaskBatch, or raise EnvError if their shape is wrong or an entry is not finite."""
    names = tuple(field.name for field in fields)
    if tasks.ndim != 2 or tasks.shape[1] != len(names) or not np.isfinite(tasks).all():
        raise EnvError(f"got tasks of shape {tasks.shape}; expected finite numbers for {names} in every row")
    return TaskBatch(tasks.astype(np.float64), ids.astype(np.int64), names, tuple(field.unit for field in fields))

"""Samplers of the tasks a learner is tested on: from a distribution, a pool, or evenly from the classes of a pool."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from metaloom.pipeline.envs.contract import EnvError, MetaEnv, TaskField
from metaloom.pipeline.types import Array, TaskBatch

_ATTEMPTS = 100


@dataclass(frozen=True)
class TaskDistribution:
    """Draws from an environment's own distribution, without those that were drawn before.

    Attributes:
        env: the environment.
        seen: [n, P], tasks that may not come up.
    """

    env: MetaEnv
    seen: Array

    def sample(self, num_tasks: int, rng: np.random.Generator) -> TaskBatch:
        """So many tasks, all different from those seen.

        Raises:
            EnvError: the distribution gives hardly any other tasks.
        """
        seen = {tuple(task) for task in self.seen.tolist()}
        tasks = np.asarray(self.env.sample_tasks(num_tasks, rng), np.float64)
        for _ in range(_ATTEMPTS):
            again = [b for b, task in enumerate(tasks.tolist()) if tuple(task) in seen]
            if not again:
                return task_batch(self.env.task_fields, tasks, np.full(num_tasks, -1))
            tasks[again] = self.env.sample_tasks(len(again), rng)
        raise EnvError(
            f"{type(self.env.unwrapped).__name__}.sample_tasks gives hardly any task that training has not drawn; "
            "required held-out tasks: name all tasks in the environment's `task_set` if there are finitely many, and "
            "the held-out ones in `test_task_set`, or evaluate on tasks=train"
        )


@dataclass(frozen=True)
class TaskPool:
    """Draws from finitely many tasks.

    Attributes:
        fields: what the columns are.
        tasks: [n, P]; a task's place is its id.
        with_replacement: draw each task independently; otherwise in blocks, each a new order of the whole pool.
    """

    fields: tuple[TaskField, ...]
    tasks: Array
    with_replacement: bool = False

    @classmethod
    def of(cls, env: MetaEnv, tasks: Sequence[Sequence[float]]) -> "TaskPool":
        """The pool of these tasks of an environment, which may have no parameters."""
        return cls(env.task_fields, np.array(tasks, np.float64).reshape(len(tasks), -1 if tasks[0] else 0))

    def all(self) -> TaskBatch:
        """Every task once, in order."""
        return self._batch(np.arange(len(self.tasks)))

    def sample(self, num_tasks: int, rng: np.random.Generator) -> TaskBatch:
        """So many tasks; up to the size of the pool no task comes twice, unless drawn with replacement."""
        n = len(self.tasks)
        if self.with_replacement:
            return self._batch(rng.integers(n, size=num_tasks))
        return self._batch(shuffled_blocks(n, num_tasks, rng))

    def _batch(self, places: Array) -> TaskBatch:
        return task_batch(self.fields, self.tasks[places], places)


@dataclass(frozen=True)
class TaskClasses:
    """Draws evenly from the classes of a pool, as benchmarks of several environments do: one per class and round.

    Attributes:
        pool: the tasks.
        field: name of the task field whose values are the classes.
    """

    pool: TaskPool
    field: str

    @property
    def num_classes(self) -> int:
        """Different values of the field."""
        return len(self._members())

    def sample(self, num_tasks: int, rng: np.random.Generator) -> TaskBatch:
        """So many tasks, round by round one of each class in the order of its value.

        Raises:
            EnvError: there is no such field, or the number of tasks is no multiple of the number of classes.
        """
        members = self._members()
        rounds, rest = divmod(num_tasks, len(members))
        if rest:
            raise EnvError(
                f"found {num_tasks} tasks to draw evenly from the {len(members)} values of {self.field}; required a "
                "multiple"
            )
        places = np.stack([group[shuffled_blocks(len(group), rounds, rng)] for group in members], axis=1).reshape(-1)
        return task_batch(self.pool.fields, self.pool.tasks[places], places)

    def _members(self) -> list[Array]:
        """The places of the tasks of each class."""
        names = [field.name for field in self.pool.fields]
        if self.field not in names:
            raise EnvError(f"found no task field {self.field!r} to draw evenly by; required one of {names}")
        column = self.pool.tasks[:, names.index(self.field)]
        return [np.flatnonzero(column == value) for value in np.unique(column)]


def distinct_tasks(env: MetaEnv, num_tasks: int, rng: np.random.Generator) -> TaskBatch:
    """So many different tasks of the environment's `task_set`, in random order, all sets of them equally likely.

    Raises:
        EnvError: the environment has no fixed set of tasks, or one of fewer.
    """
    size = len(fixed_tasks(env))
    if num_tasks > size:
        raise EnvError(
            f"found {num_tasks} tasks to draw from the {size} of {type(env.unwrapped).__name__}; "
            f"required at most {size}, since none is drawn twice"
        )
    return TaskPool.of(env, fixed_tasks(env)).sample(num_tasks, rng)


def fixed_tasks(env: MetaEnv) -> tuple[tuple[float, ...], ...]:
    """The environment's `task_set`.

    Raises:
        EnvError: it has none.
    """
    if env.task_set is None:
        raise EnvError(
            f"{type(env.unwrapped).__name__} draws its tasks from a distribution; required a fixed set (`task_set`) to "
            "collect from and to remember, such as that of pearl-cheetah-vel"
        )
    return env.task_set


def shuffled_blocks(size: int, count: int, rng: np.random.Generator) -> Array:
    """`count` places below `size`: a random order of all of them, then another one, and so on."""
    blocks = [rng.permutation(size) for _ in range(-(-count // size))]
    return np.concatenate(blocks or [np.zeros(0, np.int64)])[:count]


def task_batch(fields: tuple[TaskField, ...], tasks: Array, ids: Array) -> TaskBatch:
    """Tasks [B, P] of an environment with these fields.

    Raises:
        EnvError: they have another number of columns, or an entry that is not finite.
    """
    names = tuple(field.name for field in fields)
    if tasks.ndim != 2 or tasks.shape[1] != len(names) or not np.isfinite(tasks).all():
        raise EnvError(f"found tasks of shape {tasks.shape}; required finite numbers for {names} in every row")
    return TaskBatch(tasks.astype(np.float64), ids.astype(np.int64), names, tuple(field.unit for field in fields))

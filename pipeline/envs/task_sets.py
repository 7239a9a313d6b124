"""Fixed sets of tasks to train on and to test with, as PEARL's experiments use them."""

from collections.abc import Callable

import numpy as np

from metaloom.pipeline.envs.contract import EnvError, MetaEnv
from metaloom.pipeline.types import Array

TASK_SET_SEED = 1337
"""Of the sets' own generator: they are the same in every run, whatever its seed."""


class FixedTasks(MetaEnv):
    """An environment with a fixed set of tasks, drawn when it is made. Goes before the class of its rules."""

    def fix_tasks(
        self, draw: Callable[[int, np.random.Generator], Array], num_train_tasks: int, num_test_tasks: int
    ) -> tuple[tuple[float, ...], ...]:
        """Take tasks to train on and others to test with, from `draw(num_tasks, rng)`; the same in every process.

        Returns:
            Those to train on.

        Raises:
            EnvError: one of the sets would be empty.
        """
        for name, number in (("num_train_tasks", num_train_tasks), ("num_test_tasks", num_test_tasks)):
            if not isinstance(number, int) or number < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
                raise EnvError(f"{name} is {number!r}; required a whole number of at least 1")
        drawn = draw(num_train_tasks + num_test_tasks, np.random.default_rng(TASK_SET_SEED)).tolist()
        tasks = tuple(tuple(task) for task in drawn)
        self.task_set, self.test_task_set = tasks[:num_train_tasks], tasks[num_train_tasks:]
        return self.task_set

    def sample_tasks(self, num_tasks: int, rng: np.random.Generator) -> Array:
        """[B, P] float64, B tasks of `task_set`, each equally likely, with replacement."""
        assert self.task_set is not None
        return np.array(self.task_set)[rng.integers(len(self.task_set), size=num_tasks)]

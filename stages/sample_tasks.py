"""Draw the tasks of an iteration."""

import numpy as np

from metaloom.pipeline.envs.contract import EnvError, MetaEnv
from metaloom.pipeline.envs.finite_checks import is_ctrl_c, last_line, own_traceback
from metaloom.pipeline.seeding import generator
from metaloom.pipeline.types import Array, TaskBatch


def sample_tasks(env: MetaEnv, *, num_tasks: int, run_seed: int, iteration: int) -> TaskBatch:
    """The meta-batch of an iteration: `num_tasks` independent draws from the env's task distribution.

    Raises:
        EnvError: the env's `sample_tasks` fails, or gives something else than [B, P] finite numbers.
    """
    try:
        params = np.asarray(env.sample_tasks(num_tasks, generator(run_seed, "tasks", iteration)), np.float64)
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
            f"{type(env.unwrapped).__name__}.sample_tasks gave shape {params.shape}; "
            f"required {(num_tasks, len(names))} finite numbers: one row per task, columns {names}"
        )
    return TaskBatch(params, _ids(env, params), names, tuple(field.unit for field in env.task_fields))


def _ids(env: MetaEnv, params: Array) -> Array:
    if env.task_set is None:
        return np.full(len(params), -1, np.int64)
    place = {task: index for index, task in enumerate(env.task_set)}
    return np.array([place.get(tuple(task), -1) for task in params.tolist()], np.int64)

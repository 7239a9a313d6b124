"""Replay of the episode in which a rollout failed."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium.spaces import Discrete

from metaloom.pipeline.envs.answers import RowFault, check_facts, declared_facts, is_ctrl_c
from metaloom.pipeline.envs.config import EnvConfig
from metaloom.pipeline.envs.registry import make_batch_env, make_env
from metaloom.pipeline.types import Array
from metaloom.stages.rollouts.faults import RolloutError, describe, not_finite, problem_of


def reproduce(env: EnvConfig, about: Mapping[str, Any], arrays: Mapping[str, Array]) -> None:
    """Replay a failed episode with the same reset and actions in a new environment. Raises RolloutError if it fails.

    If this function returns, every step succeeded: the process or machine was at fault, or the environment is not
    deterministic. An environment that crashes or hangs its process also does so here, where a debugger can be attached.
    """
    if about["episode"] is None:  # for a whole shard: tasks [n, P], actions [t, n, A], reset seeds [n]
        tasks, actions, seeds = arrays["tasks"], arrays["actions"], np.array(about["seeds"], np.uint64)
    else:
        tasks, actions, seeds = arrays["task"][None], arrays["actions"][:, None], np.array([about["seed"]], np.uint64)
    one = make_env(env)
    if isinstance(one.action_space, Discrete):
        actions = actions[..., 0].astype(np.int64)
    facts = declared_facts(one)
    one.close()
    batch = make_batch_env(env, len(seeds))
    env_step: int | None = None
    try:
        with np.errstate(over="ignore", invalid="ignore"):
            _require_finite("observations", batch.reset(tasks, seeds), "reset")
            rows = np.arange(len(seeds))
            for t, action in enumerate(actions):
                env_step = t
                if not len(rows):
                    break
                _require_finite("actions", action[rows], "act")
                result = batch.step(action[rows], rows)
                _require_finite("observations", result.observations, "step")
                _require_finite("rewards", np.asarray(sum(result.reward_terms.values())), "step")
                check_facts(result.facts, facts, rows)
                rows = rows[~(result.terminated | result.truncated)]
    except BaseException as error:
        if is_ctrl_c(error):
            raise
        problem, call, trace, _ = problem_of(error, env_step)
        described = {**about, "env_step": env_step, "problem": problem, "call": call, "traceback": trace}
        raise RolloutError(describe(described), described, arrays) from error
    finally:
        batch.close()


def _require_finite(name: str, values: Array, call: str) -> None:
    if not np.isfinite(values.astype(np.float32)).all():
        raise RowFault(not_finite(name), 0, call)

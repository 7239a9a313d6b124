"""Memory check that rejects runs too large for this machine, before anything is created.

Only necessary arrays count, at their minimum size. `metaloom train RECIPE --dry-run --probe` measures actual use.
"""

import logging
from bisect import bisect_right
from collections.abc import Callable, Mapping
from typing import Any, cast

from metaloom.flows.rollouts.workers import SamplerSpec
from metaloom.pipeline.algorithms.off_policy.settings import OffPolicySettings
from metaloom.pipeline.building import build_learner
from metaloom.pipeline.config.run import RunConfig
from metaloom.pipeline.envs.spaces import observation_dtype
from metaloom.pipeline.memory import machine_memory
from metaloom.pipeline.nn.spec import RECURRENT_NETWORKS, Spaces
from metaloom.pipeline.schema import ConfigError
from metaloom.pipeline.shown import size
from metaloom.pipeline.tasks.evaluation import EvaluationPlan
from metaloom.stages.memory.replay import plan_of
from metaloom.storage.format.settings import dotted

_LOG = logging.getLogger(__name__)


def check_sizes(config: RunConfig, *, evaluation_alone: bool = False) -> None:
    """Raise ConfigError if a run, or a single evaluation, cannot fit into memory; warn if it needs more than half."""
    if refusal := refusal_of(config, evaluation_alone=evaluation_alone):
        raise ConfigError(refusal)


def refusal_of(config: RunConfig, *, evaluation_alone: bool = False) -> str | None:
    """Return why a run, or a single evaluation, cannot fit into memory, or None; warn if it needs more than half."""
    setup, _, env = build_learner(config)
    train_tasks, test_tasks = len(env.task_set or ()), len(env.test_task_set or ())
    numbers = 4 * (max(setup.action_size, 1) + 1)  # action and reward
    of_step = numbers + setup.observation_size * observation_dtype(env.observation_space, config.env).itemsize
    env.close()

    def largest(config: RunConfig) -> tuple[int, str]:
        evaluating = evaluation_alone or config.evaluation.every is not None
        arrays = {} if evaluation_alone else _training_arrays(config, setup, train_tasks, of_step)
        arrays |= _evaluation_arrays(config, test_tasks, of_step) if evaluating else {}
        return max((num_bytes, name) for name, num_bytes in arrays.items())

    memory, (least, name) = machine_memory(), largest(config)
    if least > memory:
        return _refusal(config, lambda config: largest(config)[0], memory, name)
    if least > memory / 2:
        _LOG.warning("%s take at least %s of this machine's %s of memory", name, size(least), size(memory))
    return None


def most_steps(config: RunConfig) -> int:
    """Return the number of environment steps in an iteration if no episode ends early."""
    if isinstance(config.algorithm, OffPolicySettings):
        episodes = sum(part.episodes for part in plan_of(config).rounds)
    else:
        enough = SamplerSpec.of(config, 1).enough
        episodes = config.episodes_per_task if enough is None else enough.block_size
        episodes *= config.algorithm.adaptation_steps + 1
    return config.num_tasks * episodes * config.max_episode_steps


def _training_arrays(config: RunConfig, spaces: Spaces, train_tasks: int, of_step: int) -> dict[str, int]:
    """Return the minimum sizes in bytes of the arrays that an iteration keeps in memory at once, keyed by name."""
    B, T, spec = config.num_tasks, config.max_episode_steps, SamplerSpec.of(config, 1)
    arrays: dict[str, int] = {}
    if isinstance(config.algorithm, OffPolicySettings):
        plan = plan_of(config)
        filling = max(plan.filling.steps or 0, train_tasks * (plan.filling.episodes or 0) * T)
        steps = max(filling, *(B * part.episodes * T for part in plan.rounds))
        rows = plan.tasks_per_gradient_step * (plan.batch_size + plan.context_size)
        arrays["the rows drawn in an iteration"] = 8 * plan.gradient_steps(config.episodes_per_task * T) * rows
    elif spec.enough is not None:
        # A block has slots for every possible step; otherwise only the requested number is certain.
        steps = max(spec.episodes_at_once * T, B * (spec.min_steps or 0))
    else:
        # An update reads the episodes before and after every inner step.
        steps = B * config.episodes_per_task * T * (config.algorithm.adaptation_steps + 1)
    arrays["the episodes of an iteration"] = steps * of_step
    if config.policy.network in RECURRENT_NETWORKS:
        state = config.policy.cell_spec(spaces).state_size
        arrays["the policy's memory during sampling"] = 4 * max(1, spec.episodes_at_once) * state
    return arrays


def _evaluation_arrays(config: RunConfig, test_tasks: int, of_step: int) -> dict[str, int]:
    """Return the minimum sizes in bytes of the arrays that an evaluation keeps in memory at once, keyed by name."""
    plan, asked = EvaluationPlan.of(config), config.evaluation
    given = test_tasks if isinstance(asked.tasks, str) else len(asked.tasks)
    tasks = asked.num_tasks or (1 if asked.evenly_by is not None else given or config.num_tasks)
    tested, adapted = (plan.adaptation_steps + 1) * plan.test_episodes, plan.adaptation_steps * plan.episodes
    at_once = max(plan.test_episodes, plan.episodes if plan.adaptation_steps else 0)
    return {
        "the returns of an evaluation": 8 * tasks * (tested + adapted),
        "the episodes of an evaluation": tasks * at_once * config.max_episode_steps * of_step,
    }


def _refusal(config: RunConfig, least: Callable[[RunConfig], int], memory: int, what: str) -> str:
    """Return the error message, which names the setting whose reduction would save the most memory."""
    numbers = {name: n for name, n in dotted(config.model_dump()) if type(n) is int and n > 1}
    path = min(numbers, key=lambda path: least(_with(config, path, 1)))
    fits = bisect_right(range(1, numbers[path]), memory, key=lambda n: least(_with(config, path, n)))
    required = f"at most {fits}" if fits else "a smaller value, and reduce other sizes as well"
    return (
        f"with {path}={numbers[path]}, {what} need at least {size(least(config))} of memory, but "
        f"the machine has {size(memory)}; use {required}"
    )


def _with(settings: Any, path: str, value: int) -> Any:
    name, _, rest = path.partition(".")
    inner = settings[name] if isinstance(settings, Mapping) else getattr(settings, name)
    changed = {name: _with(inner, rest, value) if rest else value}
    if isinstance(settings, Mapping):  # options of an environment or network
        return {**cast(Mapping[str, Any], settings), **changed}
    return settings.model_copy(update=changed)

"""Checks that an environment can be trained on and does the same twice, by a few short episodes with random actions."""

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Discrete
from pydantic import ValidationError

from metaloom.flows.commands.doctor import Check
from metaloom.flows.errors import UsageError
from metaloom.pipeline.config.input import override
from metaloom.pipeline.envs.config import EnvConfig
from metaloom.pipeline.envs.fact_checks import check_facts, declared_facts
from metaloom.pipeline.envs.fitting_scale import with_fitting_scale
from metaloom.pipeline.envs.registry import make_batch_env, make_env
from metaloom.pipeline.types import Array

ROWS, STEPS = 4, 50
_ADVICE = "see docs/hostile_environments.md"


def env_config(name: str, assignments: Sequence[str] = ()) -> EnvConfig:
    """An environment by name with `env.options.x=value` assignments.

    Raises:
        UsageError: they assign something else, or what an environment does not have.
    """
    settings = override({"env": {"name": name}}, assignments)
    try:
        if settings.keys() != {"env"}:
            raise UsageError(
                f"found settings of {', '.join(settings.keys() - {'env'})}; required settings of env alone"
            )
        return EnvConfig.model_validate(settings["env"])
    except ValidationError as error:
        found = "; ".join(f"env.{problem['loc'][0]}: {problem['msg']}" for problem in error.errors())
        raise UsageError(f"{found}; required: name, options.NAME, action_scale") from None


def check_environment(config: EnvConfig) -> list[Check]:
    """One finding on each property that a run depends on; those after the first failure are left out."""
    checks: list[Check] = []
    try:
        config = with_fitting_scale(config)
        first = _episodes(config)
        checks.append(Check("episodes", "ok", f"{ROWS} of up to {STEPS} steps", "sound answers"))
        checks.append(_repeats(first, _episodes(config)))
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
        checks.append(Check("episodes", "fail", found, "sound answers", _ADVICE))
    return checks


def _episodes(config: EnvConfig) -> list[Array]:
    """Everything that new environments answer to fixed tasks, seeds and actions."""
    one = make_env(config)
    facts = declared_facts(one)
    tasks = np.asarray(one.sample_tasks(ROWS, np.random.default_rng(0)), np.float64)
    batch = make_batch_env(config, ROWS)
    rng = np.random.default_rng(1)
    try:
        answers, rows = [batch.reset(tasks, np.arange(ROWS, dtype=np.uint64)).copy()], np.arange(ROWS)
        for _ in range(STEPS):
            step = batch.step(_random_actions(one.action_space, rng)[rows], rows)
            check_facts(step.facts, facts, rows)
            answers.extend([step.observations.copy(), step.terminated.copy()])
            answers.extend([*step.reward_terms.values(), *step.facts.values()])
            rows = rows[~(step.terminated | step.truncated)]
            if not len(rows):
                break
        return answers
    finally:
        batch.close()


def _random_actions(space: gymnasium.Space[Any], rng: np.random.Generator) -> Array:
    """Actions of a new policy for every row: all of the discrete ones are as likely, others go beyond their box."""
    if isinstance(space, Discrete):
        return rng.integers(space.n, size=ROWS)
    return rng.normal(0, 3, (ROWS, *(space.shape or ()))).astype(np.float32)


def _same_bits(one: Array, other: Array) -> bool:
    return np.array_equal(one, other, equal_nan=one.dtype.kind == "f")  # optional facts may be NaN


def _repeats(first: list[Array], second: list[Array]) -> Check:
    required = "the same bits with the same seeds"
    if len(first) == len(second) and all(map(_same_bits, first, second)):
        return Check("repeats", "ok", "twice the same", required)
    advice = "draw from self.np_random alone, and start anew in reset; without it replay and resume give other numbers"
    return Check("repeats", "fail", "two runs differ", required, advice)

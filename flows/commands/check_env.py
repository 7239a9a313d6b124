"""Checks that an environment can be trained on and is reproducible, by episodes with random actions."""

from collections.abc import Sequence

from pydantic import ValidationError

from metaloom.flows.errors import UsageError
from metaloom.flows.results.doctor import Check
from metaloom.flows.rollouts.rehearsal import settled
from metaloom.pipeline.config.input import override
from metaloom.pipeline.envs.config import EnvConfig, gymnasium_limit
from metaloom.pipeline.envs.contract import BatchEnv, EnvError
from metaloom.pipeline.envs.registry import make_batch_env
from metaloom.pipeline.envs.rehearsal import ROWS, Rehearsal

STEPS = 100
_ADVICE = "see docs/hostile_environments.md"


def env_config(name: str, assignments: Sequence[str] = ()) -> EnvConfig:
    """Build an environment's settings from a name and `env.options.x=value` assignments."""
    settings = override({"env": {"name": name}}, assignments)
    try:
        if settings.keys() != {"env"}:
            raise UsageError(f"found settings of {', '.join(settings.keys() - {'env'})}; required settings of env only")
        return EnvConfig.model_validate(settings["env"])
    except ValidationError as error:
        found = "; ".join(f"env.{problem['loc'][0]}: {problem['msg']}" for problem in error.errors())
        raise UsageError(f"{found}; required settings of env, such as options.NAME or wrappers") from None


def check_environment(config: EnvConfig) -> list[Check]:
    """Check the properties that a run depends on, until the first failure."""
    required = "the same bits with the same seeds"
    try:
        config, notes = settled(config, gymnasium_limit(config.name) or STEPS, always=True)
    except EnvError as error:
        return [Check("repeats", "fail", str(error), required, _ADVICE)]
    batch: BatchEnv | None = None
    try:
        batch = make_batch_env(config, ROWS)
        try:  # in this process, where errors can be read
            answers = Rehearsal(config, STEPS).play(batch, range(ROWS))
        finally:
            batch.close()
    except Exception as error:
        if batch is None and isinstance(error, EnvError):  # a wrong name or option, with a remedy
            return [Check("episodes", "fail", str(error), "an environment that can be made")]
        return [Check("episodes", "fail", f"{type(error).__name__}: {error}", "sound answers", _ADVICE)]
    count = 1 + max(episode[-1].step for episode in answers)
    episodes = Check("episodes", "ok", f"{ROWS} of up to {count} steps", "sound answers")
    found = "twice the same" if config.copies == "kept" else "the same on new copies"
    return [episodes, Check("repeats", "ok", found, required), *(Check("notice", "ok", note, "") for note in notes)]

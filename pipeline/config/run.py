"""RunConfig: the single schema for recipes, settings files, `--set` overrides and the Prefect form."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, cast

from pydantic import Field, ValidationError, model_validator

from metaloom.pipeline.algorithms import ALGORITHMS
from metaloom.pipeline.algorithms.contract import AlgorithmSettings
from metaloom.pipeline.baselines.config import BaselineConfig, BaselineField
from metaloom.pipeline.config.input import ConfigError, conversions, explain
from metaloom.pipeline.config.sections import EvaluationConfig, ReplayConfig, RetentionConfig, StoppingConfig, WarmStart
from metaloom.pipeline.device import DeviceName
from metaloom.pipeline.envs.config import EnvConfig, gymnasium_limit
from metaloom.pipeline.estimation.config import ProcessingConfig
from metaloom.pipeline.nn.spec import RECURRENT_NETWORKS, SIZED_NETWORKS, WITHOUT_MEMORY
from metaloom.pipeline.policies import PolicyConfig
from metaloom.pipeline.schema import ByName, Settings, later

MOST_ITERATIONS, MOST_STEPS = 10**8, 10**4
"""Maximum numbers of iterations and inner steps that the names of stored files can hold."""


class RunConfig(Settings):
    """All settings that determine a run's results and which results are kept, but not where the run executes."""

    env: EnvConfig
    algorithm: Annotated[AlgorithmSettings, ByName(ALGORITHMS, AlgorithmSettings)]
    policy: PolicyConfig = PolicyConfig()
    baseline: BaselineField = BaselineConfig()
    processing: ProcessingConfig = ProcessingConfig()
    iterations: int = Field(default=1001, ge=1)
    """Meta-updates in the run."""
    num_tasks: int = Field(default=40, ge=1)
    """Tasks per iteration (the meta-batch)."""
    task_sampling: Literal["uniform", "balanced"] = later("uniform")
    """Sampling of an iteration's tasks. uniform: by the environment. balanced: equally many tasks per declared class,
    with the remainder going to random classes."""
    episodes_per_task: int = Field(default=20, ge=1)
    """Complete episodes per task in each rollout batch."""
    max_episode_steps: int = Field(default=100, ge=1)
    """Steps after which an episode is truncated. Defaults to gymnasium's limit for gymnasium environments."""
    min_steps: int | None = later(None, ge=1)
    """Stop sampling a task once its episodes contain this number of steps; at most episodes_per_task episodes."""
    min_rollouts: int | None = later(None, ge=1)
    """Stop sampling a task once it has this number of episodes; with min_steps, once both are reached."""
    metrics: tuple[str, ...] = later(())
    """Custom metric functions, as module:function; each takes an EpisodeBatch or a Step."""
    seed: int = Field(default=1, ge=0, lt=2**63)
    """Seed of all random draws in the run."""
    device: DeviceName = later("cpu")
    """Device on which torch computes updates, with deterministic algorithms: cpu, cuda or mps. Environments
    and acting stay on the CPU."""
    evaluation: EvaluationConfig = EvaluationConfig()
    retention: RetentionConfig = RetentionConfig()
    replay: ReplayConfig = ReplayConfig()
    init_from: WarmStart | None = later(None)
    """Stored run whose learned parameters initialize this run: RUN, RUN@UPDATES, RUN@best or RUN@latest."""
    stop: StoppingConfig | None = None
    """Criteria for ending the run before its last iteration."""

    @model_validator(mode="after")
    def _fill_in_what_was_left_out(self) -> "RunConfig":
        for name, default in self.algorithm.run_defaults.items():
            self._default(name, default)
        # Look up the limit only if needed: gymnasium is slow to import, and the lookup may import a user's module.
        if "max_episode_steps" not in self.model_fields_set and (limit := gymnasium_limit(self.env.name)) is not None:
            self._default("max_episode_steps", limit)
        return self

    def _default(self, name: str, default: Any) -> None:
        """Set a field to an algorithm's default unless the user set it. Defaults for sections may be partial."""
        value = getattr(self, name)
        if isinstance(default, Mapping):
            given = value.model_fields_set
            missing = {field: default[field] for field in default.keys() - given}
            value = type(value).model_validate({**value.model_dump(), **missing})
            value.model_fields_set.intersection_update(given)  # keep it marked as not set by the user
        elif name not in self.model_fields_set:
            value = default
        # Settings are frozen, but this is part of their construction.
        object.__setattr__(self, name, value)

    @model_validator(mode="after")
    def _settings_fit_each_other(self) -> "RunConfig":
        if problems := [*self._problems(), *self.algorithm.problems(self)]:
            raise ValueError("\n".join(problems))
        return self

    def _problems(self) -> Iterator[str]:
        if self.evaluation.adaptation_steps and not self.algorithm.adapts:
            yield (
                f"evaluation.adaptation_steps is {self.evaluation.adaptation_steps} but {self.algorithm.name} does not "
                "adapt (inner_steps is 0); remove it or set it to 0"
            )
        if self.evaluation.remembered is not None and self.algorithm.trial is None:
            yield (
                f"evaluation.remembered is {self.evaluation.remembered} but the policy of {self.algorithm.name} has no "
                "memory; remove it"
            )
        for name, found in (("iterations", self.iterations), ("inner steps", self.algorithm.adaptation_steps + 1)):
            if found > (most := MOST_ITERATIONS if name == "iterations" else MOST_STEPS):
                yield f"{name} must be at most {most}, got {found}"
        if self.policy.network in RECURRENT_NETWORKS and self.algorithm.trial is None:
            yield (
                f"policy.network is {self.policy.network}, which has a memory, but {self.algorithm.name} keeps none; "
                f"use {WITHOUT_MEMORY}"
            )
        if self.policy.encoder is not None and self.algorithm.actor != "recurrent":
            yield f"policy.encoder is {self.policy.encoder.name}, but {self.algorithm.name} has no memory; remove it"
        yield from self._idle_sizes()
        asked = {"policy.normalize_observations": self.policy, "processing.scale_rewards": self.processing}
        for name in (name for name, section in asked.items() if getattr(section, name.partition(".")[2])):
            if (graph := self.algorithm.graph) not in ("on_policy", "trials"):
                why = "also learns from earlier iterations, which were normalized with other statistics"
                if graph not in ("off_policy", "task_inference", "trial_inference"):
                    why = f"has the graph {graph}, and only on_policy and trials keep statistics"
                yield f"{name} is on, but {self.algorithm.name} {why}; remove it"
        if self.min_rollouts is not None and self.min_rollouts > self.episodes_per_task:
            yield (
                f"min_rollouts is {self.min_rollouts} but episodes_per_task, its upper limit, is "
                f"{self.episodes_per_task}; raise episodes_per_task"
            )

    def _idle_sizes(self) -> Iterator[str]:
        """Yield a message for each hidden_sizes setting that has no effect because the network sets its own sizes."""
        policy, algorithm, default = self.policy, self.algorithm, PolicyConfig().hidden_sizes
        usual = algorithm.run_defaults.get("policy", {}).get("hidden_sizes", default)
        sizes: list[tuple[str, str, Any, tuple[Any, ...]]] = []
        if policy.name is None:
            sizes.append(("policy.hidden_sizes", policy.network, policy.hidden_sizes, (default, usual)))
        critic = getattr(algorithm, "critic_network", None) or policy.network
        for field, about in type(algorithm).model_fields.items():
            if field.endswith("_hidden_sizes"):
                sizes.append((f"algorithm.{field}", critic, getattr(algorithm, field), (about.default,)))
        for name, network, found, expected in sizes:
            if network not in SIZED_NETWORKS and found not in expected:
                yield f"{name} is {found} but the network is {network}, which sets its own sizes; remove it"

    @property
    def samples_until_enough(self) -> bool:
        """True if a task may have fewer than episodes_per_task episodes."""
        return self.min_steps is not None or self.min_rollouts is not None

    @property
    def starts_warm(self) -> bool:
        """True if the run starts from another run's learner."""
        return self.init_from is not None

    @property
    def nominal_steps_per_iteration(self) -> int:
        """Environment steps per iteration if no episode ends early."""
        rounds = self.algorithm.adaptation_steps + 1
        return self.num_tasks * self.episodes_per_task * self.max_episode_steps * rounds

    def digest(self) -> str:
        """Return the SHA-256 of the settings that determine training results.

        It omits `iterations` and `stop`, which determine when a run ends, and `evaluation`, `retention` and `replay`.
        """
        beside = ("iterations", "stop", "evaluation", "retention", "replay")
        settings = {name: value for name, value in self.decisive().items() if name not in beside}
        return hashlib.sha256(json.dumps(settings, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def build_config(settings: Mapping[str, Any]) -> RunConfig:
    """Build a RunConfig from a mapping of settings, or raise ConfigError with a message for each invalid field."""
    try:
        config = RunConfig.model_validate(settings)
    except ValidationError as error:
        raise ConfigError("\n".join(explain(problem, settings) for problem in error.errors())) from None
    if problems := list(conversions(settings, config.model_dump(mode="json"))):
        raise ConfigError("\n".join(problems))
    return config


def build_stored(settings: Mapping[str, Any]) -> RunConfig:
    """Build a stored run's RunConfig. Fields that its version did not have keep the old behavior; see build_config."""

    def named(section: str) -> dict[str, Any]:
        given = settings.get(section)
        if not isinstance(given, dict) or "name" not in given:
            raise ConfigError(f"{section}: expected {section} settings with a name, got {given!r}")
        return cast(dict[str, Any], given)

    algorithm, env = named("algorithm"), {**EnvConfig.before(), **named("env")}
    if algorithm["name"] in ALGORITHMS.builtin:
        algorithm = {**ALGORITHMS.find(algorithm["name"], AlgorithmSettings).before(), **algorithm}
    config = build_config({**settings, "algorithm": algorithm, "env": env})
    if config.algorithm.trial is None or "remembered" in settings.get("evaluation", {}):
        return config
    return config.model_copy(update={"evaluation": config.evaluation.model_copy(update={"remembered": "drawn"})})

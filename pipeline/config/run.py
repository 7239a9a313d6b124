"""RunConfig: the one schema for recipes, files, `--set` overrides and the Prefect form."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from pydantic import Field, ValidationError, model_validator

from metaloom.pipeline.algorithms import Algorithm, AlgorithmConfig
from metaloom.pipeline.baselines import BaselineConfig
from metaloom.pipeline.config.evaluation import EvaluationConfig
from metaloom.pipeline.config.input import ConfigError, conversions, explain, load_config, override
from metaloom.pipeline.config.off_policy import off_policy_problems
from metaloom.pipeline.estimation.config import ProcessingConfig, processing_problems
from metaloom.pipeline.config.sections import ReplayConfig, RetentionConfig, WarmStart
from metaloom.pipeline.config.stopping import StoppingConfig
from metaloom.pipeline.envs.config import EnvConfig, gymnasium_limit
from metaloom.pipeline.policies import PolicyConfig
from metaloom.pipeline.schema import Settings, later

__all__ = [
    "ConfigError",
    "ProcessingConfig",
    "ReplayConfig",
    "RetentionConfig",
    "RunConfig",
    "WarmStart",
    "build_config",
    "load_config",
    "override",
]


class RunConfig(Settings):
    """Everything that decides the numbers of a run, and what is kept of them. Where it runs is not part of it."""

    env: EnvConfig
    algorithm: AlgorithmConfig
    policy: PolicyConfig = PolicyConfig()
    baseline: BaselineConfig = BaselineConfig()
    processing: ProcessingConfig = ProcessingConfig()
    iterations: int = Field(default=1001, ge=1)
    """Meta-updates in the run."""
    num_tasks: int = Field(default=40, ge=1)
    """Tasks per iteration (the meta-batch)."""
    episodes_per_task: int = Field(default=20, ge=1)
    """Complete episodes per task in every round of rollouts."""
    max_episode_steps: int = Field(default=100, ge=1)
    """Steps after which an episode is truncated. Left out, gymnasium's limit for an environment of its own."""
    min_steps: int | None = later(None, ge=1)
    """Sample a task's episodes one after the other only until they have this many steps, and at most
    episodes_per_task of them."""
    min_rollouts: int | None = later(None, ge=1)
    """Sample until there are this many episodes; with min_steps, until both are reached."""
    seed: int = Field(default=1, ge=0, lt=2**63)
    evaluation: EvaluationConfig = EvaluationConfig()
    retention: RetentionConfig = RetentionConfig()
    replay: ReplayConfig = ReplayConfig()
    init_from: WarmStart | None = later(None)
    """A stored run whose parameters this one starts from: RUN, RUN@UPDATES, RUN@best or RUN@latest."""
    stop: StoppingConfig | None = None
    """When the run may end before its last iteration."""

    @model_validator(mode="after")
    def _fill_in_what_was_left_out(self) -> "RunConfig":
        for name, default in getattr(self.algorithm, "run_defaults", {}).items():
            self._default(name, default)
        if (limit := gymnasium_limit(self.env.name)) is not None:
            self._default("max_episode_steps", limit)
        return self

    def _default(self, name: str, default: Any) -> None:
        """A setting's value for this run, unless it was given; the value of a section is that of some of its fields."""
        value = getattr(self, name)
        if isinstance(default, Mapping):
            missing = {field: default[field] for field in default.keys() - value.model_fields_set}
            value = type(value).model_validate({**value.model_dump(), **missing})
        elif name not in self.model_fields_set:
            value = default
        # Settings are frozen; this is still their construction.
        object.__setattr__(self, name, value)

    @model_validator(mode="after")
    def _evaluation_fits_the_algorithm(self) -> "RunConfig":
        if self.evaluation.adaptation_steps and not self.algorithm.inner_steps:
            raise ValueError(
                f"evaluation.adaptation_steps is {self.evaluation.adaptation_steps} but algorithm.inner_steps is 0, so "
                "there is no adaptation; leave it out or set it to 0"
            )
        return self

    @model_validator(mode="after")
    def _sampling_can_end(self) -> "RunConfig":
        if self.min_rollouts is not None and self.min_rollouts > self.episodes_per_task:
            raise ValueError(
                f"min_rollouts is {self.min_rollouts} but episodes_per_task, which is the most there can be, is "
                f"{self.episodes_per_task}; raise episodes_per_task"
            )
        if self.samples_until_enough and not (self.has_critic or (self.off_policy and not self.infers_tasks)):
            raise ValueError(
                f"min_steps or min_rollouts is set, but {self.algorithm.name} learns from equally many episodes of "
                "every task; leave both out"
            )
        return self

    @model_validator(mode="after")
    def _off_policy_leaves_out_what_it_has_no_use_for(self) -> "RunConfig":
        if self.off_policy and (problem := next(off_policy_problems(self), None)):
            raise ValueError(problem)
        return self

    @model_validator(mode="after")
    def _critic_takes_the_place_of_a_baseline(self) -> "RunConfig":
        if self.has_critic and self.baseline.name != "zero":
            raise ValueError(
                f"baseline is {self.baseline.name} but {self.algorithm.name} has a critic instead; leave baseline out"
            )
        if getattr(self.algorithm, "advantage_scaling", "batch") == "running":
            if not self.processing.normalize_advantages:
                raise ValueError(
                    "algorithm.advantage_scaling is running but processing.normalize_advantages is off, so nothing is "
                    "scaled; leave one of them out"
                )
            if self.processing.adv_norm != "std":
                raise ValueError(
                    f"processing.adv_norm is {self.processing.adv_norm} but algorithm.advantage_scaling is running, "
                    "which divides by the standard deviation; leave one of them out"
                )
        particles = getattr(self.algorithm, "num_particles", 1)
        if self.algorithm.name == "svpg" and self.num_tasks != particles:
            raise ValueError(
                f"num_tasks is {self.num_tasks} but algorithm.num_particles is {particles}, and particles take the "
                "places of tasks; leave num_tasks out"
            )
        return self

    @model_validator(mode="after")
    def _fields_agree(self) -> "RunConfig":
        minibatches = getattr(self.algorithm, "num_minibatches", 1)
        steps_per_task = self.episodes_per_task * self.max_episode_steps
        if minibatches > steps_per_task:
            raise ValueError(
                f"algorithm.num_minibatches is {minibatches} but a task has at most {steps_per_task} steps "
                "(episodes_per_task * max_episode_steps); use at most that many"
            )
        if self._needs_dice and minibatches > self.episodes_per_task:
            raise ValueError(
                f"algorithm.num_minibatches is {minibatches} but episodes_per_task is {self.episodes_per_task} and "
                f"{self.algorithm.name} takes whole episodes; use at most that many"
            )
        return self

    @model_validator(mode="after")
    def _processing_fits_the_algorithm(self) -> "RunConfig":
        if "name" not in self.processing.model_fields_set:
            name = "dice" if self._needs_dice else "advantages"
            object.__setattr__(self, "processing", self.processing.model_copy(update={"name": name}))
        if problem := next(processing_problems(self.processing, self._learns_from), None):
            raise ValueError(f"{problem} (algorithm.name is {self.algorithm.name})")
        return self

    @property
    def _learns_from(self) -> tuple[str, ...]:
        """Fields of Samples in the algorithm's losses."""
        return getattr(self.algorithm, "learns_from", ("advantages",))

    @property
    def _needs_dice(self) -> bool:
        return "adjusted_rewards" in self._learns_from

    @property
    def has_critic(self) -> bool:
        """Whether the algorithm is an actor-critic."""
        return getattr(self.algorithm, "has_critic", False)

    @property
    def off_policy(self) -> bool:
        """Whether the algorithm learns from transitions of all iterations so far."""
        return getattr(self.algorithm, "off_policy", False)

    @property
    def infers_tasks(self) -> bool:
        """Whether the algorithm infers which task it acts in from what it has seen of it."""
        return getattr(self.algorithm, "infers_tasks", False)

    @property
    def samples_until_enough(self) -> bool:
        """Whether a task may have fewer than episodes_per_task episodes."""
        return self.min_steps is not None or self.min_rollouts is not None

    def build_algorithm(self) -> Algorithm:
        """The algorithm as the stages use it: what one with a critic computes depends on the discount as well."""
        builds = self.has_critic or self.off_policy
        return self.algorithm.build(self.processing) if builds else self.algorithm  # pyright: ignore

    @property
    def nominal_steps_per_iteration(self) -> int:
        """Environment steps of one iteration if no episode ends early."""
        rounds = self.algorithm.inner_steps + 1
        return self.num_tasks * self.episodes_per_task * self.max_episode_steps * rounds

    def digest(self) -> str:
        """SHA-256 of the settings that decide the numbers of training.

        `iterations` and `stop` only say where a run stops, `evaluation` what is measured on the way, `retention` what
        is kept, and `replay` how it is read.
        """
        beside = ("iterations", "stop", "evaluation", "retention", "replay")
        settings = {name: value for name, value in self.decisive().items() if name not in beside}
        return hashlib.sha256(json.dumps(settings, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def build_config(settings: Mapping[str, Any]) -> RunConfig:
    """The RunConfig that a mapping describes.

    Raises:
        ConfigError: with the path of every wrong field, the value found and what is allowed.
    """
    try:
        config = RunConfig.model_validate(settings)
    except ValidationError as error:
        raise ConfigError("\n".join(explain(problem) for problem in error.errors())) from None
    if problems := list(conversions(settings, config.model_dump(mode="json"))):
        raise ConfigError("\n".join(problems))
    return config

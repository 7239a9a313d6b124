"""RunConfig: the one schema for recipes, files, `--set` overrides and the Prefect form."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from pipeline.algorithms import Algorithm, AlgorithmConfig
from pipeline.baselines import Baseline, BaselineConfig
from pipeline.envs.config import EnvConfig, gymnasium_limit
from pipeline.evaluation_config import EvaluationConfig
from pipeline.plain_yaml import parse
from pipeline.policies import PolicyConfig
from pipeline.schema import Settings
from pipeline.stopping import StoppingConfig


class ConfigError(ValueError):
    """A configuration was refused; the message names each field, what was found and what is allowed."""


class ProcessingConfig(Settings):
    """How rewards become what an algorithm learns from."""

    name: Literal["advantages", "dice"] = "advantages"
    """dice adds adjusted rewards, which the DiCE losses are made of. A run's algorithm decides; leave it out."""
    discount: float = Field(default=0.99, ge=0, le=1)
    gae_lambda: float = Field(default=1.0, ge=0, le=1)
    normalize_advantages: bool = True
    """Zero mean and unit standard deviation per task, over real steps; of the adjusted rewards as well."""
    positive_advantages: bool = False
    """Shift the advantages of each task so that the smallest is 1e-8; the adjusted rewards as well."""
    return_baseline: BaselineConfig | None = None
    """With name=dice: predicts returns for the advantages, while `baseline` predicts the discounted rewards."""
    adv_norm: Literal["std", "variance"] = "std"
    """What normalizing divides by. variance is for comparison with garage: it undoes the common scale of tasks."""
    dice_norm: Literal["real", "padded"] = "real"
    """Statistics over real steps. padded is for comparison with the ProMP code: its DiCE counts padding as zeros."""

    @model_validator(mode="after")
    def _norms_have_something_to_do(self) -> "ProcessingConfig":
        if self.adv_norm != "std" and not self.normalize_advantages:
            raise ValueError(f"adv_norm is {self.adv_norm} but normalize_advantages is off; leave one of them out")
        if self.dice_norm != "real" and not (self.normalize_advantages or self.positive_advantages):
            raise ValueError(f"dice_norm is {self.dice_norm} but nothing is normalized or shifted; leave it out")
        return self

    def build_return_baseline(self) -> Baseline:
        """The baseline of the advantages with name=dice; without one configured, advantages are returns."""
        return (self.return_baseline or BaselineConfig(name="zero")).build()


class RetentionConfig(Settings):
    """Which iterations keep all their batches on disk. What goes can be computed again; no number depends on it.

    With neither `keep_last` nor `keep_every` all are kept; with both, those that either keeps.
    """

    keep_last: int | None = Field(default=None, ge=0)
    """Keep the batches of so many of the newest iterations."""
    keep_every: int | None = Field(default=None, ge=1)
    """Keep the batches of every so many-th iteration, from iteration 0 on."""
    max_bytes: int | None = Field(default=None, ge=1)
    """Stop before the run's files hold more than this; warn at 90 %."""


class WarmStart(Settings):
    """The learner of a stored run that another run starts from.

    A bare string stands for the run, with the number of updates behind an @.
    """

    run: str = Field(min_length=1)
    """The run's folder, or its name."""
    updates: int | None = Field(default=None, ge=0)
    """How many updates the learner has had; all that there are when the run starts, and recorded then."""
    digest: str | None = Field(default=None, pattern="^[0-9a-f]{64}$")
    """Of the output that holds the learner; recorded when the run starts, and checked whenever it is read again."""

    @model_validator(mode="before")
    @classmethod
    def _accept_a_bare_name(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        run, at, updates = value.rpartition("@")
        return {"run": run, "updates": int(updates)} if at and updates.isdecimal() else {"run": value}


_NAMED_SECTIONS = ("env", "algorithm", "baseline")
"""Sections for which a bare name stands for the section with that name and defaults."""

_LATER = ("min_steps", "min_rollouts", "init_from")

_DICE_OPTIONS = {"return_baseline": None, "dice_norm": "real"}


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
    min_steps: int | None = Field(default=None, ge=1)
    """Sample a task's episodes one after the other only until they have this many steps, and at most
    episodes_per_task of them."""
    min_rollouts: int | None = Field(default=None, ge=1)
    """Sample until there are this many episodes; with min_steps, until both are reached."""
    seed: int = Field(default=1, ge=0, lt=2**63)
    evaluation: EvaluationConfig = EvaluationConfig()
    retention: RetentionConfig = RetentionConfig()
    init_from: WarmStart | None = None
    """A stored run whose parameters this one starts from: RUN or RUN@UPDATES."""
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
        if self.samples_until_enough and not self.has_critic:
            raise ValueError(
                f"min_steps or min_rollouts is set, but {self.algorithm.name} learns from equally many episodes of "
                "every task; leave both out"
            )
        return self

    @model_validator(mode="after")
    def _critic_takes_the_place_of_a_baseline(self) -> "RunConfig":
        if self.has_critic and self.baseline.name != "zero":
            raise ValueError(
                f"baseline is {self.baseline.name} but {self.algorithm.name} has a critic instead; leave baseline out"
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
        if problem := next(_processing_problems(self.processing, self._learns_from), None):
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
    def samples_until_enough(self) -> bool:
        """Whether a task may have fewer than episodes_per_task episodes."""
        return self.min_steps is not None or self.min_rollouts is not None

    def build_algorithm(self) -> Algorithm:
        """The algorithm as the stages use it: what an actor-critic computes depends on the discount as well."""
        return self.algorithm.build(self.processing) if self.has_critic else self.algorithm  # pyright: ignore

    @property
    def nominal_steps_per_iteration(self) -> int:
        """Environment steps of one iteration if no episode ends early."""
        rounds = self.algorithm.inner_steps + 1
        return self.num_tasks * self.episodes_per_task * self.max_episode_steps * rounds

    def digest(self) -> str:
        """SHA-256 of the settings that decide the numbers of training.

        `iterations` and `stop` only say where a run stops, `evaluation` what is measured on the way, and `retention`
        what is kept.
        """
        settings = self.model_dump(mode="json", exclude={"iterations", "stop", "evaluation", "retention"})
        # Settings that came later count where they are used, so that what runs were made with keeps its digest.
        settings = {name: value for name, value in settings.items() if name not in _LATER or value is not None}
        return hashlib.sha256(json.dumps(settings, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def build_config(settings: Mapping[str, Any]) -> RunConfig:
    """The RunConfig that a mapping describes.

    Raises:
        ConfigError: with the path of every wrong field, the value found and what is allowed.
    """
    try:
        config = RunConfig.model_validate(settings)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(problem) for problem in error.errors())) from None
    if problems := list(_conversions(settings, config.model_dump(mode="json"))):
        raise ConfigError("\n".join(problems))
    return config


def load_config(path: Path) -> dict[str, Any]:
    """The settings in a YAML or JSON file, not yet validated (JSON is a subset of YAML).

    Raises:
        ConfigError: the file is missing, does not parse, or is not a mapping.
    """
    try:
        settings = parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as YAML or JSON: {error}") from None
    if not isinstance(settings, dict):
        raise ConfigError(f"{path}: found {type(settings).__name__} at the top; required a mapping of RunConfig fields")
    return settings


def override(settings: Mapping[str, Any], assignments: Iterable[str]) -> dict[str, Any]:
    """Settings with `a.b=value` assignments applied; values are read as YAML (numbers, lists, true, null, text).

    Raises:
        ConfigError: an assignment has no "=", an empty key, or reaches into something that is not a section.
    """
    merged: dict[str, Any] = json.loads(json.dumps(settings))
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not all(key.split(".")):
            raise ConfigError(f"--set {assignment}: required KEY=VALUE, for example algorithm.inner_lr=0.05")
        *sections, last = key.split(".")
        target = merged
        for section in sections:
            # `env=NAME` is short for env.name=NAME; keep the short form's meaning when a second override follows.
            if section in _NAMED_SECTIONS and isinstance(target.get(section), str):
                target[section] = {"name": target[section]}
            target = target.setdefault(section, {})
            if not isinstance(target, dict):
                raise ConfigError(f"--set {assignment}: {section} is a value, not a section, so it has no field {last}")
        try:
            target[last] = parse(text)
        except ValueError:
            raise ConfigError(f"--set {assignment}: the value is not valid YAML; quote it") from None
    return merged


def _processing_problems(processing: ProcessingConfig, learns_from: Sequence[str]) -> Iterator[str]:
    needed = "dice" if "adjusted_rewards" in learns_from else "advantages"
    changed = {name for name in _DICE_OPTIONS if getattr(processing, name) != _DICE_OPTIONS[name]}
    if processing.name != needed:
        yield f"processing.name is {processing.name} but the algorithm needs {needed}; leave processing.name out"
    elif needed == "advantages":
        yield from (f"processing.{name} is set but is for DiCE alone; leave it out" for name in sorted(changed))
    elif "advantages" not in learns_from:
        unused = changed & {"return_baseline"} | ({"gae_lambda"} if processing.gae_lambda != 1 else set())
        why = "the algorithm does not learn from advantages"
        yield from (f"processing.{name} is set but {why}; leave it out" for name in sorted(unused))
    elif processing.return_baseline is None:
        yield "processing.return_baseline is not set but the algorithm learns from advantages; name one or zero"


def _explain(problem: Any) -> str:
    # pydantic puts the tag of a union (promp) into the path; a user never typed it.
    loc = problem["loc"]
    path = ".".join(str(part) for part in (loc[:1] + loc[2:] if loc[:1] == ("algorithm",) else loc))
    found = problem["input"]
    shown = "" if isinstance(found, dict) else f"; found {found!r}"
    if problem["type"] == "extra_forbidden":
        return f"{path}: unknown key{shown}; see `metaloom recipes --schema` for the keys there are"
    return f"{path or 'config'}: {problem['msg']}{shown}"


def _conversions(given: Any, kept: Any, *path: str) -> Iterator[str]:
    """Where pydantic made another value of what was given: 1 of true, 5 of "5". Only integers stand for floats."""
    if isinstance(given, Mapping) and isinstance(kept, Mapping):
        for name in given.keys() & kept.keys():
            yield from _conversions(given[name], kept[name], *path, name)
    elif isinstance(given, Sequence) and isinstance(kept, list):
        for n, pair in enumerate(zip(given, kept, strict=True)):
            yield from _conversions(*pair, *path, str(n))
    elif isinstance(kept, int | float) and (
        isinstance(given, str)
        or isinstance(given, bool) != isinstance(kept, bool)
        or (isinstance(given, float) and isinstance(kept, int))
    ):
        required = {bool: "true or false", int: "an integer", float: "a number"}[type(kept)]
        yield f"{'.'.join(path)}: required {required}; found {given!r}"

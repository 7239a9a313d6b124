"""Settings for optimizers and learning-rate schedules."""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, Discriminator, Field, JsonValue, Tag, field_validator, model_validator

from metaloom.pipeline.schema import MOST_REPEATS, Settings, later, suggestion

_NOT_FROM_A_COUNT = {
    "ReduceLROnPlateau": "waits for a metric to stop improving",
    "LambdaLR": "needs a function",
    "MultiplicativeLR": "needs a function",
    "SequentialLR": "combines other schedulers",
    "ChainedScheduler": "combines other schedulers",
}
FROM_A_COUNT = (
    "StepLR", "MultiStepLR", "ConstantLR", "LinearLR", "ExponentialLR", "PolynomialLR", "CosineAnnealingLR",
    "CosineAnnealingWarmRestarts", "CyclicLR", "OneCycleLR",
)  # fmt: skip
"""Torch schedulers to suggest for an unknown name. Later torch versions may have more."""
_BUILT_IN = ("constant", "linear", "exponential")
SHORT_NAMES = {"adam": "Adam", "rmsprop": "RMSprop", "sgd": "SGD"}


class TorchScheduler(Settings):
    """A torch.optim.lr_scheduler class whose factor depends only on the number of updates."""

    name: str
    """Class name, such as CosineAnnealingLR."""
    options: dict[str, JsonValue] = Field(default_factory=dict)
    """Keyword arguments of the class, such as {T_max: 100}, with times counted in updates."""

    @field_validator("name")
    @classmethod
    def _follows_from_a_count(cls, name: str) -> str:
        if name in _NOT_FROM_A_COUNT:
            raise ValueError(
                f"{name} {_NOT_FROM_A_COUNT[name]}; use a scheduler that depends only on the number of updates, "
                "so any iteration can be recomputed, such as CosineAnnealingLR"
            )
        return name


def _from_bare_name(value: Any) -> Any:
    if not isinstance(value, str) or value in _BUILT_IN:
        return value
    # Class names begin with a capital letter; other names are meant as built-in schedules.
    if value[:1].isupper():
        return {"name": value}
    close = [name for name in FROM_A_COUNT if value.lower() in name.lower()] or ["CosineAnnealingLR"]
    raise ValueError(
        f"got {value!r}; expected one of {', '.join(_BUILT_IN)}, or a class of torch.optim.lr_scheduler, such as "
        f"{' or '.join(close)}, as in {{name: CosineAnnealingLR, options: {{T_max: 1000}}}}"
        f"{suggestion(value, _BUILT_IN)}"
    )


LrSchedule = Annotated[
    Annotated[Literal["constant", "linear", "exponential"], Tag("built_in")] | Annotated[TorchScheduler, Tag("torch")],
    Discriminator(lambda value: "built_in" if isinstance(value, str) else "torch"),
    BeforeValidator(_from_bare_name),
]
"""Learning-rate schedule. The bare name of a torch scheduler selects it with default options."""


S = TypeVar("S", bound="LearningRate | ScheduledSteps")


def _with_schedule(settings: S) -> S:
    """Return the settings, or raise ValueError if the schedule lacks an option or ignores one that is set."""
    schedule, decay, horizon = settings.lr_schedule, settings.lr_decay, settings.lr_horizon
    name = schedule.name if isinstance(schedule, TorchScheduler) else schedule
    if name == "linear" and horizon is None:
        raise ValueError(
            "lr_schedule is linear but lr_horizon is not set; set algorithm.lr_horizon to the iteration at which step "
            "sizes reach zero"
        )
    if horizon is not None and name != "linear":
        raise ValueError(
            f"lr_horizon is {horizon} but lr_schedule is {name}; set algorithm.lr_schedule=linear or remove lr_horizon"
        )
    if decay != 1 and name != "exponential":
        raise ValueError(f"lr_decay is {decay} but lr_schedule is {name}; remove lr_decay")
    if decay == 1 and name == "exponential":
        raise ValueError(
            f"lr_schedule is exponential but lr_decay is {decay}, which changes nothing; set lr_decay below 1 or "
            "remove lr_schedule"
        )
    return settings


class LearningRate(BaseModel):
    """Settings for algorithms with a single learning rate and a schedule."""

    learning_rate: float = Field(default=5e-4, gt=0)
    """Learning rate of the policy's optimizer."""
    lr_schedule: LrSchedule = "constant"
    """Learning-rate schedule over iterations: constant, linear, exponential, or a torch scheduler."""
    lr_decay: float = Field(default=1.0, gt=0, le=1)
    """With lr_schedule=exponential: factor by which the learning rate is multiplied each iteration."""
    lr_horizon: int | None = Field(default=None, ge=1)
    """With lr_schedule=linear: iteration at which the learning rate reaches zero."""

    _schedule_has_what_it_needs = model_validator(mode="after")(_with_schedule)


class ScheduledSteps(BaseModel):
    """Schedule settings for algorithms with their own learning-rate settings. Version 0.1 had no schedule for them."""

    lr_schedule: LrSchedule = later("constant")
    """Learning-rate schedule over iterations: constant, linear, exponential, or a torch scheduler."""
    lr_decay: float = later(1.0, gt=0, le=1)
    """With lr_schedule=exponential: factor by which learning rates are multiplied each iteration."""
    lr_horizon: int | None = later(None, ge=1)
    """With lr_schedule=linear: iteration at which learning rates reach zero."""

    _schedule_has_what_it_needs = model_validator(mode="after")(_with_schedule)


class NaturalSteps(BaseModel):
    """Settings for TRPO's natural-gradient steps, Schulman et al. 2015, arXiv:1502.05477."""

    max_kl: float = Field(default=0.01, gt=0)
    """Bound δ on the mean KL divergence between the behavior policy and the updated policy, in nats. With inner steps,
    it applies to the adapted policies."""
    cg_iterations: int = Field(default=10, ge=1, le=MOST_REPEATS)
    """Maximum number of conjugate gradient iterations."""
    cg_tolerance: float = Field(default=1e-10, ge=0)
    """Squared norm of the residual at which conjugate gradient stops."""
    cg_damping: float = Field(default=1e-5, ge=0)
    """Damping: multiple of the identity that is added to the Fisher matrix."""
    backtrack_ratio: float = Field(default=0.8, gt=0, lt=1)
    """Factor by which the line search shrinks the step after each trial."""
    line_search_trials: int = Field(default=15, ge=1, le=MOST_REPEATS)
    """Maximum number of line-search trials; the first is the full step."""
    accept_violation: bool = later(False)
    """If no trial lowers the loss within the bound, accept the last trial anyway, as garage's option does."""


class OptimizerConfig(Settings):
    """A torch optimizer. A bare string sets the name: `--set algorithm.optimizer=AdamW`."""

    short_for = "name"
    name: str
    """adam, rmsprop, sgd, or any torch.optim class that needs only gradients, such as AdamW."""
    options: dict[str, JsonValue] = Field(default_factory=dict)
    """Keyword arguments of the class, such as {weight_decay: 0.01}. The learning rate is an algorithm setting."""

    @field_validator("options")
    @classmethod
    def _no_step_size(cls, options: dict[str, JsonValue]) -> dict[str, JsonValue]:
        if "lr" in options:
            raise ValueError("lr is the algorithm's own setting (learning_rate, outer_lr); remove it from the options")
        return options

    @property
    def torch_name(self) -> str:
        """Class name in torch.optim."""
        return SHORT_NAMES.get(self.name, self.name)

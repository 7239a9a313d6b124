"""What a policy looks like, as plain data: workers read it without importing torch."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from metaloom.pipeline.schema import Settings

ActorKind = Literal["policy", "uniform", "tanh_gaussian", "q_values"]
"""How actions come about in rollouts: "policy" is the Gaussian where they are numbers and the categorical where they
are choices, "uniform" draws them all alike, "tanh_gaussian" and "q_values" are those of off-policy learners."""

LayerSize = Annotated[int, Field(ge=1)]


class PolicyConfig(Settings):
    """A tanh network: of means where actions are numbers, of logits where they are choices.

    The Gaussian has one standard deviation per action, whatever the state; its options are not for choices.
    """

    hidden_sizes: tuple[LayerSize, ...] = Field(default=(64, 64), min_length=1)
    """Units in each hidden layer of the mean network."""
    init_std: float = Field(default=1.0, gt=0)
    """Standard deviation of every action before training."""
    min_std: float = Field(default=1e-6, gt=0)
    """Floor of the standard deviation, wherever it is used: acting, recording, losses."""
    learn_std: bool = True
    """Whether adaptation and meta-training change the standard deviation; otherwise it stays at init_std."""

    @model_validator(mode="after")
    def _floor_is_below_start(self) -> "PolicyConfig":
        if self.min_std > self.init_std:
            raise ValueError(f"min_std is {self.min_std} but init_std is {self.init_std}; use min_std <= init_std")
        return self

    @property
    def std_options(self) -> dict[str, object]:
        """Options of the standard deviation that were changed, which a choice among actions has none of."""
        names = ("init_std", "min_std", "learn_std")
        return {name: getattr(self, name) for name in names if getattr(self, name) != _DEFAULTS[name]}


_DEFAULTS = {name: about.default for name, about in PolicyConfig.model_fields.items()}

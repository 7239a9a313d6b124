"""Which baseline a run uses."""

from typing import Any, Literal

from pydantic import Field, model_validator

from pipeline.baselines.contract import Baseline
from pipeline.baselines.linear import LinearFeatureBaseline, LinearTimeBaseline
from pipeline.baselines.zero import ZeroBaseline
from pipeline.schema import Settings

DEFAULT_REGULARIZATION = 1e-5


class BaselineConfig(Settings):
    """A baseline by name.

    A bare string stands for the name: `--set baseline=zero`.
    """

    name: Literal["linear_feature", "linear_time", "zero"] = "linear_feature"
    """linear_feature: observations and time; linear_time: time alone; zero: no baseline."""
    regularization: float = Field(default=DEFAULT_REGULARIZATION, ge=0)
    """Ridge added to the normal equations of the linear baselines."""

    @model_validator(mode="before")
    @classmethod
    def _accept_a_bare_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _zero_has_nothing_to_regularize(self) -> "BaselineConfig":
        if self.name == "zero" and self.regularization != DEFAULT_REGULARIZATION:
            raise ValueError(
                "regularization is set but the zero baseline is not fitted; leave it out or name a linear one"
            )
        return self

    def build(self) -> Baseline:
        """The baseline that these settings describe."""
        match self.name:
            case "linear_feature":
                return LinearFeatureBaseline(self.regularization)
            case "linear_time":
                return LinearTimeBaseline(self.regularization)
            case "zero":
                return ZeroBaseline()

"""Settings for the baseline used to compute advantages."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from metaloom.pipeline.baselines.contract import Baseline
from metaloom.pipeline.baselines.linear import LinearFeatureBaseline, LinearTimeBaseline, ZeroBaseline
from metaloom.pipeline.baselines.value_network import ValueNetworkBaseline
from metaloom.pipeline.plugins import Plugins
from metaloom.pipeline.schema import MOST_REPEATS, ByName, PluginSettings, Settings
from metaloom.pipeline.types import Array, ParallelMap, Params

_BUILT_IN: dict[str, tuple[type[Baseline], tuple[str, ...]]] = {
    "linear_feature": (LinearFeatureBaseline, ("regularization",)),
    "linear_time": (LinearTimeBaseline, ("regularization",)),
    "zero": (ZeroBaseline, ()),
    "value_network": (
        ValueNetworkBaseline, ("hidden_sizes", "num_epochs", "learning_rate", "steps_per_minibatch", "shared")
    ),
}  # fmt: skip
"""Class and options of each built-in baseline."""


class BaselineSettings(PluginSettings, Settings, Baseline):
    """Baseline settings, which also serve as the baseline itself unless `build` is overridden."""

    def build(self) -> Baseline:
        """Return the baseline that these settings describe; by default, the settings themselves."""
        return self


class BaselineConfig(BaselineSettings):
    """Settings for a built-in baseline."""

    name: Literal["linear_feature", "linear_time", "zero", "value_network"] = "linear_feature"
    """linear_feature: linear in features of observations and time; linear_time: of time only; zero: no baseline;
    value_network: a small network of observations and time."""
    regularization: float = Field(default=1e-5, ge=0)
    """Ridge coefficient in the normal equations of the linear baselines."""
    hidden_sizes: tuple[Annotated[int, Field(ge=1)], ...] = (32, 32)
    """Units in each hidden layer of the value network."""
    num_epochs: int = Field(default=20, ge=1, le=MOST_REPEATS)
    """Number of training passes of the value network over the steps of a rollout batch."""
    learning_rate: float = Field(default=0.02, gt=0)
    """Initial step size of the value network, which decays linearly to zero."""
    steps_per_minibatch: int = Field(default=250, ge=1)
    """Environment steps per gradient step of the value network."""
    shared: bool = False
    """Fit one value network to all tasks of a rollout batch instead of one per task."""

    @model_validator(mode="after")
    def _options_belong_to_the_baseline(self) -> "BaselineConfig":
        for option, about in type(self).model_fields.items():
            value = getattr(self, option)
            if option != "name" and option not in _BUILT_IN[self.name][1] and value != about.default:
                raise ValueError(f"{option} is {value} but the baseline {self.name} has no such option; remove it")
        return self

    def fit_predict(
        self, observations: Array, targets: Array, mask: Array, *, seed: int = 0, parallel: ParallelMap = map
    ) -> Array:
        return self.build().fit_predict(observations, targets, mask, seed=seed, parallel=parallel)

    def fit(
        self, observations: Array, targets: Array, mask: Array, *, seed: int = 0, parallel: ParallelMap = map
    ) -> Params:
        return self.build().fit(observations, targets, mask, seed=seed, parallel=parallel)

    def build(self) -> Baseline:
        baseline, options = _BUILT_IN[self.name]
        return baseline(**{option: getattr(self, option) for option in options})


BASELINES = Plugins(
    "baseline", "metaloom.baselines", dict.fromkeys(_BUILT_IN, "metaloom.pipeline.baselines.config:BaselineConfig")
)
"""Registry of baseline settings, subclasses of BaselineSettings."""

BaselineField = Annotated[BaselineSettings, ByName(BASELINES, BaselineSettings, default="linear_feature")]
"""Baseline selected by name. A bare string sets the name: `--set baseline=zero`."""

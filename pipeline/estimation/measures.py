"""Additional metrics of every rollout batch: from the environment, and from custom functions."""

import functools
import inspect
import logging
import math
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from metaloom.pipeline.plugins import Plugins, load
from metaloom.pipeline.schema import ConfigError
from metaloom.pipeline.types import EpisodeBatch, Metrics, Step

log = logging.getLogger(__name__)

METRICS = Plugins("metric", "metaloom.metrics", {})
"""Functions of an EpisodeBatch or a Step that return metrics by name; the parameter's annotation decides which."""

Numbers = Mapping[str, float]
_REQUIRED = "required a function of one EpisodeBatch or Step, annotated so, that returns numbers by name"


@dataclass(frozen=True)
class Measures:
    """Functions whose results become metrics.

    Attributes:
        of_episodes: Functions of a rollout batch, by name.
        of_steps: name -> function of an inner step with its samples.
    """

    of_episodes: Mapping[str, Callable[[EpisodeBatch], Numbers]]
    of_steps: Mapping[str, Callable[[Step], Numbers]]

    @classmethod
    def named(cls, names: Iterable[str], *, diagnostics: Callable[[EpisodeBatch], Numbers] | None = None) -> "Measures":
        """Find functions by name, and take an environment's diagnostics.

        Raises:
            ConfigError: a name belongs to no such function; none of its code has been called.
        """
        found = {name: _find(name) for name in names}
        of_episodes = {name: function for name, (of, function) in found.items() if of is EpisodeBatch}
        if diagnostics is not None:
            of_episodes["env.diagnostics"] = diagnostics
        return cls(of_episodes, {name: function for name, (of, function) in found.items() if of is Step})

    def of_round(self, rounds: Sequence[EpisodeBatch], k: int) -> Metrics:
        """Return metrics of the episodes collected after k adaptations; of several batches the mean over episodes.

        Raises:
            ConfigError: a function does not return values by name.
        """
        total = sum(int(episodes.real.sum()) for episodes in rounds)
        metrics: Metrics = {}
        for source, function in self.of_episodes.items():
            for episodes in rounds:
                weight = int(episodes.real.sum()) / total
                for name, value in _checked(source, function(episodes)).items():
                    key = f"step_{k}.{name}"
                    metrics[key] = metrics.get(key, 0.0) + weight * value
        return metrics

    def of_step(self, step: Step) -> Metrics:
        """Return the metrics of an inner step."""
        metrics = self.of_round([step.episodes], step.k)
        for source, function in self.of_steps.items():
            metrics |= {f"step_{step.k}.{name}": value for name, value in _checked(source, function(step)).items()}
        return metrics


NO_MEASURES = Measures({}, {})


def with_own(metrics: Metrics, own: Metrics) -> Metrics:
    """Join a run's standard metrics with its custom ones; warn of custom metrics that are not finite.

    Raises:
        ConfigError: a custom metric would hide a standard one.
    """
    if taken := sorted(metrics.keys() & own.keys()):
        raise ConfigError(f"metrics: found {', '.join(taken)}, which every run has; return it under another name")
    for name, value in own.items():
        if not math.isfinite(value):
            _tell(name, str(value))
    return metrics | own


def _find(name: str) -> tuple[type, Callable[[Any], Numbers]]:
    """Return a function by name, and the kind of its argument."""
    try:
        function = load(METRICS.path(name))
        if not inspect.isfunction(function):
            raise ConfigError(f"found {name!r}, which is a {type(function).__name__}; {_REQUIRED}")
        (parameter, *_) = [*inspect.signature(function).parameters, ""]
        of = typing.get_type_hints(function).get(parameter)
    except (NameError, TypeError) as problem:
        raise ConfigError(f"metrics: found {name!r}, whose annotations say {problem}; {_REQUIRED}") from problem
    except ConfigError as problem:
        raise ConfigError(f"metrics: {problem}") from problem
    if of not in (EpisodeBatch, Step):
        raise ConfigError(f"metrics: found {name!r}, whose parameter is annotated {of}; {_REQUIRED}")
    return of, function


def _checked(source: str, numbers: object) -> dict[str, float]:
    if not isinstance(numbers, Mapping) or not all(isinstance(name, str) for name in numbers):
        raise ConfigError(f"metrics: {source} returned {numbers!r}; required numbers by name")
    try:
        return {name: float(value) for name, value in numbers.items()}
    except (TypeError, ValueError) as problem:
        raise ConfigError(f"metrics: {source} returned {numbers!r}: {problem}; required numbers by name") from problem


@functools.cache  # once, not in every iteration
def _tell(name: str, value: str) -> None:
    # Metrics decide nothing, so training continues.
    log.warning("metrics: %s is %s, and stored so; required a finite number", name, value)

"""Metrics of rollout batches, keyed by stored name: built-in, from an environment, and custom."""

import inspect
import math
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

import numpy as np

from metaloom.pipeline.nn.spec import Spaces
from metaloom.pipeline.plugins import Plugins, load
from metaloom.pipeline.schema import ConfigError
from metaloom.pipeline.types import Array, EpisodeBatch, Metrics, Samples, Step

METRICS = Plugins("metric", "metaloom.metrics", {})
"""Registry of functions that return metrics of an EpisodeBatch or a Step, as their annotation indicates."""

Numbers = Mapping[str, float]
_REQUIRED = "use a function of one EpisodeBatch or Step, annotated as such, that returns a mapping from names to floats"


@dataclass(frozen=True)
class Measures:
    """The functions that compute a run's custom metrics, including its environment's diagnostics."""

    of_episodes: Mapping[str, Callable[[EpisodeBatch], Numbers]]
    of_steps: Mapping[str, Callable[[Step], Numbers]]

    @classmethod
    def named(cls, names: Iterable[str], *, diagnostics: Callable[[EpisodeBatch], Numbers] | None = None) -> "Measures":
        """Return Measures with the functions of these names, without calling them, and an environment's diagnostics.

        Raises ConfigError if a name does not refer to a function of one EpisodeBatch or Step, annotated as such.
        """
        found = {name: _find(name) for name in names}
        of_episodes = {name: function for name, (of, function) in found.items() if of is EpisodeBatch}
        if diagnostics is not None:
            of_episodes["env.diagnostics"] = diagnostics
        return cls(of_episodes, {name: function for name, (of, function) in found.items() if of is Step})

    def of_round(self, rounds: Sequence[EpisodeBatch], k: int) -> Metrics:
        """Return metrics of rollout batches collected after k adaptation steps, averaged over all their episodes."""
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


def with_own(metrics: Metrics, own: Metrics) -> Metrics:
    """Return standard and custom metrics together. Raises ConfigError if a name occurs in both."""
    if taken := sorted(metrics.keys() & own.keys()):
        raise ConfigError(f"metrics: every run already has {', '.join(taken)}; return custom metrics under other names")
    return metrics | own


def _find(name: str) -> tuple[type, Callable[[Any], Numbers]]:
    """Look up a function by name; return the type of its argument and the function."""
    try:
        function = load(METRICS.path(name))
        if not inspect.isfunction(function):
            raise ConfigError(f"{name!r} has type {type(function).__name__}; {_REQUIRED}")
        (parameter, *_) = [*inspect.signature(function).parameters, ""]
        of = typing.get_type_hints(function).get(parameter)
    except (NameError, TypeError) as problem:
        raise ConfigError(f"metrics: the annotations of {name!r} are invalid ({problem}); {_REQUIRED}") from problem
    except ConfigError as problem:
        raise ConfigError(f"metrics: {problem}") from problem
    if of not in (EpisodeBatch, Step):
        raise ConfigError(f"metrics: the parameter of {name!r} is annotated {of}; {_REQUIRED}")
    return of, function


def _checked(source: str, numbers: object) -> dict[str, float]:
    if not isinstance(numbers, Mapping) or not all(isinstance(name, str) for name in numbers):
        raise ConfigError(f"metrics: {source} returned {numbers!r}; expected a mapping from names to floats")
    try:
        return {name: float(value) for name, value in numbers.items()}
    except (TypeError, ValueError) as problem:
        raise ConfigError(
            f"metrics: {source} returned {numbers!r}: {problem}; expected a mapping from names to floats"
        ) from problem


def fact_means(facts: Mapping[str, Array]) -> Metrics:
    """Return the means of per-episode facts, which are [...] bool or float32, keyed by name.

    A flag yields `NAME_rate`, the share of episodes where it is set; a number yields `average_NAME`, ignoring NaN.
    """
    means: Metrics = {}
    for name, values in facts.items():
        is_flag = values.dtype == np.bool_
        known = values if is_flag else values[~np.isnan(values)]
        mean = float(known.mean(dtype=np.float64)) if known.size else np.nan
        means[f"{name}_rate" if is_flag else f"average_{name}"] = mean
    return means


def step_metrics(step: Step) -> Metrics:
    """Return the standard metrics of an inner step, with names prefixed by `step_k.`.

    Returns are undiscounted unless the name says otherwise. `explained_variance` is a mean over tasks, because the
    baseline is fitted per task. `policy_std` and `entropy` (in nats, joint over action dimensions) describe the
    behavior policy; categorical policies have no `policy_std`, and custom policies may have neither.
    """
    episodes, samples, behavior = step.episodes, step.samples, step.episodes.behavior
    of_policy: Metrics = {}
    if "log_probs" in behavior:
        log_probs = behavior["log_probs"][episodes.mask != 0].astype(np.float64)
        of_policy = {"entropy": -(np.exp(log_probs) * log_probs).sum(-1).mean()}
    elif "log_std" in behavior:
        log_std = behavior["log_std"].astype(np.float64)
        entropy = (log_std + 0.5 * (math.log(2 * math.pi) + 1)).sum(-1).mean()
        of_policy = {"policy_std": np.exp(log_std).mean(), "entropy": entropy}
    per_task = zip(samples.values, samples.returns, samples.mask, strict=True)
    metrics = {
        "average_discounted_return": samples.returns[..., 0][_real(episodes)].mean(dtype=np.float64),
        "explained_variance": np.mean([explained_variance(*task) for task in per_task]),
        **of_policy,
    }
    own = {f"step_{step.k}.{name}": float(value) for name, value in metrics.items()}
    return episode_metrics([episodes], step.k) | own


def episode_metrics(rounds: Sequence[EpisodeBatch], k: int) -> Metrics:
    """Return the standard metrics of episodes, with names prefixed by `step_k.`. Returns are undiscounted.

    The metrics include means of the facts that the environment reports, such as `success_rate` or `average_distance`.
    """
    returns, lengths, truncated = (
        np.concatenate([getattr(episodes, name)[_real(episodes)].ravel() for episodes in rounds])
        for name in ("episode_returns", "lengths", "truncated")
    )
    metrics = {
        "average_return": returns.mean(),
        "std_return": returns.std(),
        "max_return": returns.max(),
        "min_return": returns.min(),
        "num_episodes": returns.size,
        "average_length": lengths.mean(),
        "fraction_truncated": truncated.mean(),
    }
    parts = [(episodes.episode_facts, _real(episodes)) for episodes in rounds]
    facts = {name: np.concatenate([values[name][real].ravel() for values, real in parts]) for name in rounds[0].facts}
    return {f"step_{k}.{name}": float(value) for name, value in (metrics | fact_means(facts)).items()}


def explained_variance(values: Array, returns: Array, mask: Array) -> float:
    """Return 1 - Var(returns - values) / Var(returns) over the real entries; 0 if the returns do not vary."""
    real = mask != 0
    returns_std, residual_std = (np.asarray(x, np.float64)[real].std() for x in (returns, returns - values))
    return 0.0 if returns_std == 0 else float(1 - (residual_std / returns_std) ** 2)


def names_of_metrics(
    measures: Measures, sizes: Spaces, facts: Mapping[str, bool], *, processed: bool
) -> frozenset[str] | None:
    """Return the names of a run's metrics, without the prefix `step_k.`, by computing them on synthetic episodes.

    Return None if a function fails, as it may on such episodes. Raises ConfigError if a function uses the name of a
    standard metric, or does not return numbers keyed by name.
    """
    step = _made_up(sizes, facts)
    with np.errstate(all="ignore"):
        try:
            own = measures.of_step(step)
        except ConfigError:
            raise
        except Exception:
            return None
        taken = step_metrics(step) if processed else episode_metrics([step.episodes], step.k)
    return frozenset(name.partition(".")[2] for name in with_own(taken, dict.fromkeys(own, 0.0)))


def _made_up(sizes: Spaces, facts: Mapping[str, bool]) -> Step:
    rng, (B, E, T) = np.random.default_rng(0), (2, 2, 10)

    def draw(*shape: int) -> Array:
        return rng.standard_normal(shape, np.float32)

    A, n = sizes.action_size, sizes.num_actions
    gaussian = {"mean": draw(B, E, T, A), "log_std": draw(B, A)}
    log_probs = np.full((B, E, T, n), -np.log(max(n, 1)), np.float32)
    rewards, none = draw(B, E, T), np.zeros((B, E), bool)
    episodes = EpisodeBatch(
        observations=draw(B, E, T + 1, sizes.observation_size),
        actions=rng.integers(n, size=(B, E, T)) if n else draw(B, E, T, A),
        rewards=rewards,
        terminated=none,
        truncated=~none,
        lengths=np.full((B, E), T, np.int32),
        behavior={"log_probs": log_probs} if n else gaussian,
        reward_terms={},
        initial_state=np.zeros((B, E, 0)),
        facts={name: np.zeros((B, E), bool if is_flag else np.float32) for name, is_flag in facts.items()},
    )
    return Step(episodes, Samples(rewards, rewards, rewards, np.ones_like(rewards)), 0)


def _real(episodes: EpisodeBatch) -> Array | EllipsisType:
    """Return an index that selects the real episodes; an ellipsis if all are real, to preserve the summation order."""
    return ... if episodes.real.all() else episodes.real

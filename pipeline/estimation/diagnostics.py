"""Numbers that describe rounds of episodes, by the names under which they are kept as metrics."""

from collections.abc import Sequence
from types import EllipsisType

import numpy as np

from metaloom.pipeline.estimation.returns import explained_variance
from metaloom.pipeline.nn.distributions import LOG_2PI
from metaloom.pipeline.types import Array, EpisodeBatch, Metrics, Step


def step_metrics(step: Step) -> Metrics:
    """Averages over all episodes of all tasks of round k, each name prefixed with `step_k.`.

    Returns are undiscounted unless the name says so. `explained_variance` is the mean over tasks, since the baseline is
    fitted to each task. `policy_std` and `entropy` (nats, joint over actions) are those of the policy that acted; a
    categorical one has no `policy_std`, a user's own has neither.
    """
    episodes, samples = step.episodes, step.samples
    per_task = zip(samples.values, samples.returns, samples.mask, strict=True)
    metrics = {
        "average_discounted_return": samples.returns[..., 0][_real(episodes)].mean(dtype=np.float64),
        "explained_variance": np.mean([explained_variance(*task) for task in per_task]),
        **_policy_metrics(episodes),
    }
    own = {f"step_{step.k}.{name}": float(value) for name, value in metrics.items()}
    return episode_metrics([episodes], step.k) | own


def episode_metrics(rounds: Sequence[EpisodeBatch], k: int) -> Metrics:
    """Averages over all episodes of some rounds, each name prefixed with `step_k.`; returns are undiscounted."""
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
    return {f"step_{k}.{name}": float(value) for name, value in metrics.items()}


def _real(episodes: EpisodeBatch) -> Array | EllipsisType:
    """Index of the real episodes; all at once where there are no others, which sums in another order."""
    return ... if episodes.real.all() else episodes.real


def _policy_metrics(episodes: EpisodeBatch) -> Metrics:
    if "log_probs" in episodes.behavior:
        log_probs = episodes.behavior["log_probs"][episodes.mask != 0].astype(np.float64)
        return {"entropy": -(np.exp(log_probs) * log_probs).sum(-1).mean()}
    if "log_std" not in episodes.behavior:
        return {}
    log_std = episodes.behavior["log_std"].astype(np.float64)
    return {"policy_std": np.exp(log_std).mean(), "entropy": (log_std + 0.5 * (LOG_2PI + 1)).sum(-1).mean()}

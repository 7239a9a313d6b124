"""Numbers that describe one round of episodes, by the names under which they are kept as metrics."""

from types import EllipsisType

import numpy as np

from pipeline.distributions import LOG_2PI
from pipeline.estimators import explained_variance
from pipeline.types import Array, EpisodeBatch, Metrics, Step


def step_metrics(step: Step) -> Metrics:
    """Averages over all episodes of all tasks of round k, each name prefixed with `step_k.`.

    Returns are undiscounted unless the name says so. `explained_variance` is the mean over tasks, since the baseline is
    fitted to each task. `policy_std` and `entropy` (nats, joint over actions) are those of the policy that acted; one
    that chooses has no `policy_std`.
    """
    episodes, samples = step.episodes, step.samples
    real: Array | EllipsisType = ... if episodes.real.all() else episodes.real
    episode_returns = episodes.episode_returns[real]
    per_task = zip(samples.values, samples.returns, samples.mask, strict=True)
    metrics = {
        "average_return": episode_returns.mean(),
        "average_discounted_return": samples.returns[..., 0][real].mean(dtype=np.float64),
        "std_return": episode_returns.std(),
        "max_return": episode_returns.max(),
        "min_return": episode_returns.min(),
        "num_episodes": episode_returns.size,
        "average_length": episodes.lengths[real].mean(),
        "fraction_truncated": episodes.truncated[real].mean(),
        "explained_variance": np.mean([explained_variance(*task) for task in per_task]),
        **_policy_metrics(episodes),
    }
    return {f"step_{step.k}.{name}": float(value) for name, value in metrics.items()}


def _policy_metrics(episodes: EpisodeBatch) -> Metrics:
    if "log_probs" in episodes.behavior:
        log_probs = episodes.behavior["log_probs"][episodes.mask != 0].astype(np.float64)
        return {"entropy": -(np.exp(log_probs) * log_probs).sum(-1).mean()}
    log_std = episodes.behavior["log_std"].astype(np.float64)
    return {"policy_std": np.exp(log_std).mean(), "entropy": (log_std + 0.5 * (LOG_2PI + 1)).sum(-1).mean()}

"""From rewards to advantages."""

import numpy as np

from pipeline.algorithms.contract import ParallelMap
from pipeline.baselines import Baseline, BaselineError
from pipeline.estimators import discounted_returns, gae, normalize, shift_positive
from pipeline.types import Array, EpisodeBatch, Samples


def process_samples(
    episodes: EpisodeBatch,
    baseline: Baseline,
    *,
    discount: float,
    gae_lambda: float,
    normalize_advantages: bool,
    positive_advantages: bool,
    parallel: ParallelMap = map,
) -> Samples:
    """Returns, baseline values and advantages of every step; zero on padding.

    The baseline is fitted to each task's returns and predicts the same episodes. Nothing follows an episode's last
    step, whether the task or the step limit ended it: the task is to do well within the limit.

    Args:
        episodes: one round of rollouts.
        baseline: predicts returns.
        discount: γ.
        gae_lambda: λ of the generalized advantage estimate.
        normalize_advantages: zero mean and unit standard deviation over each task's real steps.
        positive_advantages: shift each task's advantages, after normalizing, so that the smallest is 1e-8.
        parallel: maps over tasks; the result does not depend on it, nor on other tasks.
    """
    mask = episodes.mask
    returns = discounted_returns(episodes.rewards * mask, discount)

    def process_task(b: int) -> tuple[Array, Array]:
        try:
            values = baseline.fit_predict(episodes.observations[b, :, :-1], returns[b], mask[b])
        except BaselineError as error:
            raise BaselineError(f"process_samples, task {b}: {error}") from error
        rewards = episodes.rewards[b] * mask[b]
        advantages = task_advantages(
            rewards,
            values,
            mask[b],
            discount=discount,
            gae_lambda=gae_lambda,
            normalize_advantages=normalize_advantages,
            positive_advantages=positive_advantages,
        )
        return values, advantages

    values, advantages = zip(*parallel(process_task, range(len(mask))), strict=True)
    return Samples(
        returns=returns.astype(np.float32),
        values=np.stack(values).astype(np.float32),
        advantages=np.stack(advantages).astype(np.float32),
        mask=mask,
    )


def task_advantages(
    rewards: Array,
    values: Array,
    mask: Array,
    *,
    discount: float,
    gae_lambda: float,
    normalize_advantages: bool,
    positive_advantages: bool,
) -> Array:
    """Advantages [E, T] of one task in float64, from its rewards and baseline values, both zero on padding."""
    after_last = np.zeros((len(values), 1))
    advantages = gae(rewards, np.concatenate([values, after_last], axis=1), discount, gae_lambda)
    if normalize_advantages:
        advantages = normalize(advantages, mask)
    if positive_advantages:
        advantages = shift_positive(advantages, mask)
    return advantages

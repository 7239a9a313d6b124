"""Processing of rewards: returns, advantages and, for DiCE, adjusted rewards."""

from dataclasses import replace
from functools import partial

import numpy as np

from metaloom.pipeline.baselines import Baseline, BaselineConfig, BaselineError
from metaloom.pipeline.baselines.contract import by_task
from metaloom.pipeline.estimation.config import ProcessingConfig
from metaloom.pipeline.estimation.returns import discounted_returns, discounted_rewards, gae, normalize, shift_positive
from metaloom.pipeline.types import Array, EpisodeBatch, ParallelMap, Params, Samples


def process_samples(
    episodes: EpisodeBatch,
    baseline: Baseline,
    processing: ProcessingConfig,
    *,
    seed: int = 0,
    parallel: ParallelMap = map,
) -> Samples:
    """Compute returns, baseline values and advantages per step, and adjusted rewards for DiCE; zero in the padding.

    A baseline is fitted to each task's returns and predicts the same episodes. For DiCE, `baseline` predicts discounted
    rewards, and the configured `return_baseline` predicts returns. The value after an episode's last step is 0 even if
    it was truncated: the objective is the return within the limit. The seed is for the baselines' random draws.
    """
    mask = episodes.mask
    rewards = episodes.rewards * mask
    returns = discounted_returns(rewards, processing.discount)
    values = _fit_predict(_of_returns(baseline, processing), episodes, returns, seed, parallel)
    advantages = by_task(partial(task_advantages, processing=processing), rewards, values, mask, parallel)
    samples = Samples(*(part.astype(np.float32) for part in (returns, values, advantages)), mask=mask)
    if processing.name == "advantages":
        return samples
    discounted = discounted_rewards(rewards, processing.discount)
    predicted = _fit_predict(baseline, episodes, discounted, seed, parallel)
    adjusted = [scale(task, real, processing) for task, real in zip(discounted - predicted, mask, strict=True)]
    # If statistics include padding, padding is not zero; losses mask it anyway.
    adjusted_rewards = np.stack(adjusted).astype(np.float32) * mask
    return replace(samples, advantages=samples.advantages * mask, adjusted_rewards=adjusted_rewards)


def baseline_parameters(
    episodes: EpisodeBatch, baseline: Baseline, processing: ProcessingConfig, *, seed: int = 0
) -> dict[str, Params]:
    """Return the parameters [B, ...] of the baselines that `process_samples` fits, keyed by setting and name."""
    rewards = episodes.rewards * episodes.mask
    fits = {"baseline": (_of_returns(baseline, processing), discounted_returns(rewards, processing.discount))}
    if processing.name == "dice":
        adjusted = discounted_rewards(rewards, processing.discount)
        fits = {"baseline": (baseline, adjusted), "return_baseline": fits["baseline"]}
    return {
        name: fitted.fit(_seen(episodes), targets, episodes.mask, seed=seed) for name, (fitted, targets) in fits.items()
    }


def task_advantages(rewards: Array, values: Array, mask: Array, processing: ProcessingConfig) -> Array:
    """Return one task's advantages [E, T] float64, processed by `scale`; rewards and values are zero in the padding."""
    next_values = np.concatenate([values[:, 1:], np.zeros((len(values), 1))], axis=1)
    advantages = gae(rewards, values, next_values, processing.discount, processing.gae_lambda)
    return scale(advantages, mask, processing)


def scale(values: Array, mask: Array, processing: ProcessingConfig) -> Array:
    """Return one task's values [E, T], normalized and shifted according to `processing`.

    Padding is zero, unless DiCE's statistics include it (`dice_norm` is "padded").
    """
    if processing.name == "dice" and processing.dice_norm == "padded":
        mask = np.ones_like(mask)
    if processing.normalize_advantages:
        values = normalize(values, mask, processing.adv_norm)
    if processing.positive_advantages:
        values = shift_positive(values, mask)
    return values


def _of_returns(baseline: Baseline, processing: ProcessingConfig) -> Baseline:
    if processing.name == "advantages":
        return baseline
    return (processing.return_baseline or BaselineConfig(name="zero")).build()


def _seen(episodes: EpisodeBatch) -> Array:
    """Return the observations before each step as float32, because small integer types overflow silently."""
    return episodes.observations[:, :, :-1].astype(np.float32, copy=False)


def _fit_predict(baseline: Baseline, episodes: EpisodeBatch, targets: Array, seed: int, parallel: ParallelMap) -> Array:
    try:
        return baseline.fit_predict(_seen(episodes), targets, episodes.mask, seed=seed, parallel=parallel)
    except BaselineError as error:
        raise BaselineError(f"process_samples, {error}") from error

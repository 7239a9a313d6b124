"""Running statistics of observations and returns, and what they do to episodes."""

from dataclasses import replace

import numpy as np
import pytest
from gymnasium.wrappers.utils import RunningMeanStd
from numpy.testing import assert_allclose, assert_array_equal

from metaloom.pipeline.estimation.normalization import (
    MEAN,
    REWARD_STD,
    STD,
    Normalization,
    RunningStatistics,
    merged_observations,
    merged_returns,
)
from metaloom.pipeline.types import EpisodeBatch

B, E, T, O = 2, 3, 7, 4
DISCOUNT = 0.9
RNG = np.random.default_rng(0)


def round_of(lengths: list[list[int]]) -> EpisodeBatch:
    """Episodes whose padding holds numbers that nothing may read."""
    real = np.array(lengths, np.int32)
    return EpisodeBatch(
        observations=RNG.normal(50, [0.01, 1, 100, 0.1], (B, E, T + 1, O)).astype(np.float32),
        actions=np.zeros((B, E, T), np.int64),
        rewards=RNG.normal(3, 20, (B, E, T)).astype(np.float32),
        terminated=np.zeros((B, E), bool),
        truncated=real > 0,
        lengths=real,
        behavior={},
        reward_terms={},
        initial_state=np.zeros((B, E, 0)),
    )


ROUNDS = [round_of([[7, 2, 1], [3, 7, 0]]), round_of([[1, 0, 0], [7, 7, 7]])]


def test_statistics_are_those_that_gymnasium_gathers_step_by_step() -> None:
    observed, earned = RunningStatistics.initial((O,)), RunningStatistics.initial(())
    references = RunningMeanStd(shape=(O,)), RunningMeanStd(shape=())
    for batch in ROUNDS:
        observed, earned = merged_observations(observed, [batch]), merged_returns(earned, [batch], DISCOUNT)
        for (b, e), n in np.ndenumerate(batch.lengths):
            for observation in batch.observations[b, e, : n + 1 if n else 0].astype(np.float64):
                references[0].update(observation[None])
            running = 0.0  # as VecNormalize of Stable-Baselines3, which forgets it where an episode ends
            for reward in batch.rewards[b, e, :n].astype(np.float64):
                running = running * DISCOUNT + reward
                references[1].update(np.array([running]))
        for found, reference in zip((observed, earned), references, strict=True):
            assert_allclose(found.mean, reference.mean, rtol=1e-12)
            assert_allclose(found.variance, reference.var, rtol=1e-12)
            assert_allclose(found.count, reference.count, rtol=1e-12)


def test_episodes_are_normalized_clipped_and_zero_on_padding() -> None:
    statistics = merged_observations(RunningStatistics.initial((O,)), ROUNDS)
    params = {
        MEAN: np.tile(statistics.mean.astype(np.float32), (B, 1)),
        STD: np.tile(statistics.std, (B, 1)),
        REWARD_STD: np.full(B, 0.5, np.float32),
    }
    normalization = Normalization.of_params(params)
    assert normalization is not None
    far = replace(ROUNDS[0], observations=ROUNDS[0].observations * np.array([1, 1, 30, 1], np.float32))
    found = normalization.episodes(far)
    for (b, e), n in np.ndenumerate(far.lengths):
        real = n + 1 if n else 0
        exact = (far.observations[b, e, :real] - statistics.mean) / np.sqrt(statistics.variance + 1e-8)
        assert_allclose(found.observations[b, e, :real], np.clip(exact, -10, 10), rtol=1e-5, atol=1e-4)
        assert not found.observations[b, e, real:].any()
    assert found.observations.max() == 10
    assert_allclose(replace(statistics, variance=np.zeros(O)).std, 1e-4, rtol=1e-6)
    assert_array_equal(found.rewards, np.clip(far.rewards * 2, -10, 10))
    assert found.rewards.max() == 10


@pytest.mark.parametrize("kind", [np.uint8, np.int16, np.int32, np.uint32, np.int64])
def test_integers_are_normalized_as_their_float32(kind: type) -> None:
    normalization = Normalization(np.full((B, O), 1.5, np.float32), np.full((B, O), 2.0, np.float32))
    batch = replace(ROUNDS[0], observations=RNG.integers(0, 100, (B, E, T + 1, O)).astype(kind))
    found = normalization.episodes(batch).observations
    floats = replace(batch, observations=batch.observations.astype(np.float32))
    assert found.dtype == np.float32
    assert_array_equal(found, normalization.episodes(floats).observations)


def test_without_statistics_nothing_is_normalized() -> None:
    assert Normalization.of_params({"mean_network.output.bias": np.zeros((B, 1), np.float32)}) is None
    of_rewards = Normalization(reward_std=np.full(B, 2.0, np.float32))
    assert of_rewards.observations(ROUNDS[0].observations) is ROUNDS[0].observations

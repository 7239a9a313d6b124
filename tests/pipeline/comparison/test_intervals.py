import math
from itertools import product

import numpy as np
import pytest

from metaloom.pipeline.comparison.groups import Resampled
from metaloom.pipeline.comparison.intervals import (
    CONFIDENCE,
    IntervalEnds,
    degrees_of_freedom,
    resampled_weights,
    standard_error,
    student_cdf,
    student_interval,
    student_quantile,
    welch_degrees,
)
from metaloom.pipeline.comparison.scores import Scores, interquartile_mean, mean_score


@pytest.mark.parametrize(
    ("degrees", "expected"), [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (9, 2.262), (30, 2.042), (120, 1.980)]
)
def test_quantiles_are_those_of_the_printed_tables(degrees, expected):
    assert student_quantile(0.975, degrees) == pytest.approx(expected, abs=0.0006)


@pytest.mark.parametrize("degrees", [1, 2, 5, 8])
def test_the_distribution_is_the_integral_of_its_density(degrees):
    x = np.linspace(0, 1.7, 20001)
    constant = math.gamma((degrees + 1) / 2) / (math.sqrt(degrees * math.pi) * math.gamma(degrees / 2))
    area = np.trapezoid(constant * (1 + x**2 / degrees) ** (-(degrees + 1) / 2), x)
    assert student_cdf(1.7, degrees) == pytest.approx(0.5 + area, abs=1e-8)


def test_with_many_runs_the_quantile_is_that_of_the_normal_distribution():
    assert student_quantile(0.975, 10**4) == pytest.approx(1.9602, abs=1e-4)
    assert student_quantile(0.975, 10**5) == pytest.approx(1.95996, abs=1e-5)


def test_a_resample_has_as_many_runs_of_each_environment():
    scores = Scores((np.zeros(1),) * 5, ("a", "a", "a", "b", "b"))
    weights = resampled_weights(scores, np.random.default_rng(0), 500)
    np.testing.assert_allclose(weights[:, :3].sum(axis=1), 0.5)
    np.testing.assert_allclose(weights[:, 3:].sum(axis=1), 0.5)
    np.testing.assert_allclose(weights.mean(axis=0), scores.even_weights, atol=0.02)
    np.testing.assert_allclose(weights[:, 3:] * 4, np.round(weights[:, 3:] * 4))


def test_the_standard_error_of_a_mean_is_the_deviation_of_the_runs_over_the_root_of_their_number():
    values = np.random.default_rng(1).normal(size=(6, 9))
    scores = Scores.of(values)
    resampled = mean_score(scores, resampled_weights(scores, np.random.default_rng(0), 40000))
    expected = values.mean(axis=1).std(ddof=1) / math.sqrt(6)
    assert float(standard_error(scores, resampled)) == pytest.approx(expected, rel=0.02)


def test_resamples_are_distributed_as_all_possible_ones():
    scores = Scores.of(np.random.default_rng(2).normal(size=(4, 3)))
    every = [np.bincount(drawn, minlength=4) / 4 for drawn in product(range(4), repeat=4)]
    exact = interquartile_mean(scores, np.array(every))
    drawn = interquartile_mean(scores, resampled_weights(scores, np.random.default_rng(0), 40000))
    assert drawn.mean() == pytest.approx(exact.mean(), abs=0.01)
    assert drawn.std() == pytest.approx(exact.std(), rel=0.02)


def test_one_run_of_an_environment_has_no_interval():
    scores = Scores((np.zeros(2), np.ones(2), np.ones(2)), ("a", "a", "b"))
    assert degrees_of_freedom(scores) == 0
    assert np.isnan(standard_error(scores, np.zeros(10)))
    estimate = Resampled({"": scores}, 0, 200).interquartile_mean("")
    assert estimate.value == 1  # the 0 is the lowest quarter, and all above it is 1
    assert np.isnan([estimate.low, estimate.high]).all()
    profile = Resampled({"": scores}, 0, 200).profile("", np.array([0.5, 2.0]))
    assert (profile.values == [0.75, 0]).all()
    assert np.isnan([profile.low, profile.high]).all()


def test_an_interval_reaches_as_many_standard_errors_as_its_degrees_say_and_is_none_without_them():
    assert student_interval(1.0, 0.5, 1) == pytest.approx((1 - 6.353, 1 + 6.353), abs=1e-3)
    assert student_interval(1.0, 0.5, 4.9) == pytest.approx((1 - 1.388, 1 + 1.388), abs=1e-3)
    assert np.isnan([student_interval(1.0, 0.5, 0.9), student_interval(1.0, math.inf, 4)]).all()


def test_the_degrees_of_a_difference_are_between_those_of_the_smaller_group_and_of_both_together():
    assert welch_degrees((1.0, 1.0), (4, 4)) == pytest.approx(8)
    assert welch_degrees((1.0, 1e-9), (4, 9)) == pytest.approx(4)
    assert welch_degrees((2.0, 1.0), (4, 9)) == pytest.approx((4 + 1) ** 2 / (16 / 4 + 1 / 9))
    assert welch_degrees((0.0, 0.0), (4, 9)) == 4
    assert welch_degrees((1.0, 1.0), (1, 1)) == pytest.approx(2)
    assert welch_degrees((1.0, math.nan), (4, 0)) == 0


def coverage(draw, truth, repetitions):
    """How often the interval of Student's t, and the percentiles, hold the truth."""
    hits = np.zeros(2)
    for repetition in range(repetitions):
        rng = np.random.default_rng([11, repetition])
        scores = Scores.of(draw(rng))
        resampled = interquartile_mean(scores, resampled_weights(scores, rng, 400))
        error = float(standard_error(scores, resampled))
        student = student_interval(float(interquartile_mean(scores)), error, degrees_of_freedom(scores))
        percentiles = IntervalEnds(*np.quantile(resampled, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2]))
        for place, interval in enumerate((student, percentiles)):  # those of arXiv:2108.13264
            hits[place] += interval.low <= truth <= interval.high
    return hits / repetitions


@pytest.mark.parametrize("runs", [3, 5])
def test_intervals_hold_the_truth_with_few_runs_where_percentiles_do_not(runs):
    # Seeds differ by 2, tasks by 3, episodes of a task by 1, around 10; symmetric, so the truth is 10.
    student, percentiles = coverage(
        lambda rng: 10 + 2 * rng.normal(size=(runs, 1)) + np.hypot(3, 1) * rng.normal(size=(runs, 20)), 10, 500
    )
    assert 0.92 <= student <= 0.98
    assert percentiles < 0.87

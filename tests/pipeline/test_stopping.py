"""Criteria that end a run."""

import numpy as np
import pytest

from metaloom.pipeline.config.sections import StoppingConfig, trend_p_value
from metaloom.pipeline.schema import ConfigError


def metrics(average, minimum=0.0, steps=0):
    return {
        "step_0.average_return": -1e9,
        "step_0.min_return": -1e9,
        "step_1.average_return": average,
        "step_1.min_return": minimum,
        "step_1.max_return": average + 1,
        "env_steps": float(steps),
    }


def test_samples_end_a_run_once_they_are_made():
    stop = StoppingConfig(samples=100)
    assert not stop.met([])
    assert not stop.met([metrics(0, steps=99)])
    assert stop.met([metrics(0, steps=99), metrics(0, steps=100)])


@pytest.mark.parametrize(("statistic", "met"), [("min", False), ("average", False), ("max", True)])
def test_a_return_threshold_looks_at_the_last_round_of_the_last_iteration(statistic, met):
    stop = StoppingConfig(return_threshold=5, statistic=statistic)
    assert stop.met([metrics(4.5, 3)]) == met
    assert stop.met([metrics(5, 5)])
    assert not stop.met([metrics(9, 9), metrics(1, 1)])


def test_criteria_combine():
    history = [metrics(9, 9, steps=10)]
    assert StoppingConfig(samples=100, return_threshold=5).met(history)
    assert not StoppingConfig(samples=100, return_threshold=5, combine="all").met(history)
    assert StoppingConfig(samples=10, return_threshold=5, combine="all").met(history)


def test_the_trend_test_is_students():
    # Slope 0.95, residual sum of squares 0.175, so t = 0.95 / sqrt(0.175 / 2 / 5); with two degrees of freedom the
    # two-sided p-value is 1 - t / sqrt(t² + 2).
    t = 0.95 / np.sqrt(0.175 / 10)
    assert trend_p_value(np.array([1.0, 2.0, 2.5, 4.0])) == pytest.approx(1 - t / np.sqrt(t**2 + 2), rel=1e-5)
    assert trend_p_value(np.array([1.0, 3.0, 0.0, 2.0, 1.5])) == pytest.approx(1.0, abs=1e-9)
    assert trend_p_value(np.array([5.0, 5.0, 5.0])) == 1
    assert trend_p_value(np.array([1.0, 2.0, 3.0])) < 1e-6


def test_numbers_without_a_trend_have_uniform_p_values():
    rng = np.random.default_rng(0)
    found = np.array([trend_p_value(rng.normal(size=8)) for _ in range(2000)])
    for level in (0.05, 0.5, 0.95):
        assert (found < level).mean() == pytest.approx(level, abs=0.03)


def test_convergence_needs_its_whole_window_and_no_trend():
    stop = StoppingConfig(convergence_window=4, statistic="average")
    flat = [metrics(x) for x in (1, 2, 2, 1)]
    assert stop.met(flat)
    assert not stop.met(flat[:3])
    assert not stop.met([metrics(x) for x in (1, 2, 3, 4.1)])
    assert stop.met([metrics(x) for x in (-50, 9)] + flat)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "stop names no criterion"),
        ({"combine": "all"}, "stop names no criterion"),
        ({"samples": 3, "statistic": "max"}, "statistic is set but no criterion uses returns"),
        ({"samples": 3, "convergence_p_value": 0.5}, "convergence_window is not; set both or neither"),
        ({"metric": "success_rate"}, "metric is 'success_rate', at_least None, at_most None; give"),
        ({"metric": "success_rate", "at_least": 1, "at_most": 2}, "at_least 1.0, at_most 2.0; give a metric and one"),
        ({"samples": 3, "at_most": 2}, "metric is None, at_least None, at_most 2.0; give a metric"),
        ({"samples": 0}, "greater than or equal to 1"),
        ({"convergence_window": 2}, "greater than or equal to 3"),
    ],
)
def test_options_without_a_criterion_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        StoppingConfig(**settings)


def test_the_least_that_a_criterion_can_ask_for_is_taken():
    assert StoppingConfig(samples=1).met([metrics(0, steps=1)])
    assert StoppingConfig(convergence_window=3).met([metrics(x) for x in (2, 2, 2)])


def test_a_metric_that_no_batch_has_is_refused_with_those_that_it_has():
    stop = StoppingConfig(metric="sucess_rate", at_least=1)
    with pytest.raises(ConfigError, match=r"unknown metric 'sucess_rate'; .* energy, success_rate; did"):
        stop.require_metric({"success_rate", "energy"})
    StoppingConfig(metric="step_0.energy", at_most=1).require_metric({"success_rate", "energy"})
    last = {"step_1.min_return": 1.0, "step_0.min_return": 0.0, "env_steps": 3.0}
    with pytest.raises(ConfigError, match=r"the run has step_0\.min_return, step_1\.min_return$"):
        stop.met([last])


def test_the_criteria_that_are_met_say_what_was_found():
    last = {"env_steps": 40.0, "step_0.min_return": -3.0, "step_1.min_return": 1.25, "step_1.success_rate": 0.95}
    either = StoppingConfig(samples=50, return_threshold=1.0, metric="success_rate", at_least=0.9)
    assert [*either.reasons([last])] == ["the min return is 1.25, at least 1", "success_rate is 0.95, at least 0.9"]
    assert not either.reasons([])
    both = StoppingConfig(samples=50, return_threshold=1.0, combine="all")
    assert not both.reasons([last])
    assert [*both.reasons([last | {"env_steps": 50.0}])] == [
        "50 environment steps of 50",
        "the min return is 1.25, at least 1",
    ]
    nearer = StoppingConfig(metric="step_0.min_return", at_most=-2.0)
    assert [*nearer.reasons([last])] == ["step_0.min_return is -3, at most -2"]
    for bound in ("at_least", "at_most"):
        assert StoppingConfig(metric="success_rate", **{bound: 0.95}).met([last])

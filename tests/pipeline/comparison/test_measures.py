import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaloom.pipeline.comparison.scores import (
    Scores,
    interquartile_mean,
    mean_score,
    performance_profile,
)
from metaloom.pipeline.estimation import statistics

finite = st.floats(-1e6, 1e6, allow_subnormal=False)
tables = st.integers(1, 4).flatmap(lambda b: st.lists(st.lists(finite, min_size=b, max_size=b), min_size=1, max_size=5))


def by_definition(values, weights):
    """The interquartile mean as an integral of the quantile function over [1/4, 3/4], in small steps."""
    order = np.argsort(values)
    edges = np.cumsum(np.array(weights)[order]) / np.sum(weights)
    middles = 0.25 + (np.arange(20000) + 0.5) / 40000
    return np.array(values)[order][np.searchsorted(edges, middles)].mean()


def test_the_interquartile_mean_of_two_runs_with_four_tasks_worked_out():
    # Of 0 1 2 3 10 11 12 100 the middle four: (2 + 3 + 10 + 11) / 4.
    scores = Scores.of([[0.0, 100, 2, 11], [1.0, 12, 10, 3]])
    assert float(interquartile_mean(scores)) == pytest.approx(6.5)
    assert float(mean_score(scores)) == pytest.approx(139 / 8)


@given(tables)
def test_with_even_weights_it_is_that_of_all_scores_together(values):
    expected = float(statistics.interquartile_mean(np.array(values).ravel()))
    assert float(interquartile_mean(Scores.of(values))) == pytest.approx(expected, rel=1e-9, abs=1e-6)


@given(tables, st.data())
def test_a_weight_of_two_is_a_run_that_stands_twice(values, data):
    times = data.draw(st.lists(st.integers(0, 3), min_size=len(values), max_size=len(values)).filter(any))
    repeated = [row for row, count in zip(values, times, strict=True) for _ in range(count)]
    weights = np.array(times) / sum(times)
    for measure in (interquartile_mean, mean_score):
        weighted, expected = measure(Scores.of(values), weights), measure(Scores.of(repeated))
        assert float(weighted) == pytest.approx(float(expected), rel=1e-9, abs=1e-6)


def test_it_is_the_integral_of_the_quantiles_over_the_middle_half_also_where_runs_have_different_numbers_of_tasks():
    rng = np.random.default_rng(0)
    rows = [rng.normal(size=n) for n in (3, 7, 1)]
    weights = np.concatenate([np.full(len(row), 1 / (3 * len(row))) for row in rows])
    expected = by_definition(np.concatenate(rows), weights)
    assert float(interquartile_mean(Scores.of(rows))) == pytest.approx(expected, abs=1e-4)


@given(tables, st.floats(0.1, 10), finite)
def test_it_moves_and_stretches_with_the_scores(values, scale, shift):
    before = float(interquartile_mean(Scores.of(values)))
    moved = float(interquartile_mean(Scores.of(scale * np.array(values) + shift)))
    assert moved == pytest.approx(scale * before + shift, rel=1e-9, abs=1e-4)


def test_rows_of_weights_give_what_each_gives_also_in_blocks(monkeypatch):
    rng = np.random.default_rng(0)
    scores, weights = Scores.of(rng.normal(size=(4, 6))), rng.dirichlet(np.ones(4), size=25)
    singly = [float(interquartile_mean(scores, row)) for row in weights]
    monkeypatch.setattr("metaloom.pipeline.comparison.scores._NUMBERS_AT_ONCE", 100)
    np.testing.assert_allclose(interquartile_mean(scores, weights), singly, rtol=1e-12)


def test_every_environment_counts_the_same_however_many_runs_and_tasks_it_has():
    scores = Scores(
        (np.array([0.0]), np.array([0.0]), np.array([0.0]), np.array([8.0, 8.0, 8.0])), ("a", "a", "a", "b")
    )
    assert float(mean_score(scores)) == pytest.approx(4)
    np.testing.assert_allclose(scores.even_weights, [1 / 6, 1 / 6, 1 / 6, 1 / 2])


def test_environments_are_in_one_order_whichever_runs_come_first():
    names = [f"env-{letter}" for letter in "gbadfceh"]
    for order in (names, names[::-1]):
        assert Scores((np.zeros(1),) * 8, tuple(order)).stratum_names == [f"env-{letter}" for letter in "abcdefgh"]


def test_a_profile_is_the_fraction_of_scores_above():
    profile = performance_profile(Scores.of([[1.0, 2.0], [3.0, 4.0]]), np.array([0.0, 1.0, 2.5, 4.0]))
    np.testing.assert_allclose(profile, [1, 0.75, 0.5, 0])  # a score at a threshold is not above it


@given(tables)
def test_a_profile_falls_from_one_to_none_and_its_area_is_the_mean(values):
    scores = Scores.of(values)
    low, high = np.min(values) - 1, np.max(values) + 1
    thresholds = np.linspace(low, high, 4001)
    profile = performance_profile(scores, thresholds)
    assert (profile[0], profile[-1]) == (pytest.approx(1), 0)
    assert (np.diff(profile) <= 1e-12).all()
    area = low + np.trapezoid(profile, thresholds)
    assert area == pytest.approx(float(mean_score(scores)), abs=(high - low) / 1000)


@pytest.mark.parametrize("rows", [[], [[]], [[1.0, np.nan]], [[np.inf]]])
def test_scores_that_are_none_are_refused(rows):
    with pytest.raises(ValueError, match=r"at least one run|one or more finite numbers"):
        Scores.of(rows)


def test_runs_of_the_same_tasks_have_as_many():
    with pytest.raises(ValueError, match="same tasks"):
        Scores.of([[1.0, 2.0], [1.0]], same_tasks=True)
    other = Scores((np.ones(1), np.ones(2)), ("", ""))
    assert not (Scores.of([[1.0, 2.0]], same_tasks=True) + other).same_tasks

import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from metaloom.pipeline.comparison.intervals import improvement_interval, probability_of_improvement
from metaloom.pipeline.comparison.scores import Scores

finite = st.floats(-1e6, 1e6, allow_subnormal=False)
tables = st.integers(1, 4).flatmap(lambda b: st.lists(st.lists(finite, min_size=b, max_size=b), min_size=1, max_size=5))


def test_the_probability_of_improvement_worked_out_task_by_task():
    x = Scores.of([[1.0, 5.0], [2.0, 5.0]], same_tasks=True)
    y = Scores.of([[0.0, 6.0], [2.0, 5.0]], same_tasks=True)
    # Task 0: 1>0, 1<2, 2>0, 2=2: 2.5 of 4. Task 1: 5<6, 5=5, twice: 1 of 4. Their mean is 3.5 of 8.
    assert probability_of_improvement(x, y) == pytest.approx(3.5 / 8)
    # By means: 3 and 3.5 against 3 and 3.5: a tie, a loss, a win, a tie.
    other = Scores.of([[0.0, 6.0], [2.0, 5.0]])
    assert probability_of_improvement(x, other) == pytest.approx(0.5)


@example([[0.0], [-1.0], [-1.0], [-1.0], [-2.0]], [[-1.0], [-1.0], [-1.0], [-2.0], [-3.0]])  # 8 degrees of freedom
@settings(max_examples=20)  # each looks for the ends of two intervals
@given(tables, tables)
def test_it_and_that_of_the_other_way_round_add_up_to_one_and_so_do_their_intervals(a, b):
    x, y = Scores.of(a), Scores.of(b)
    found, other = probability_of_improvement(x, y), probability_of_improvement(y, x)
    assert found + other == pytest.approx(1)
    assert probability_of_improvement(x, x) == pytest.approx(0.5)
    (low, high), (other_low, other_high) = improvement_interval(x, y), improvement_interval(y, x)
    if min(len(x), len(y)) < 2:
        assert np.isnan([low, high]).all()
    else:
        assert 0 <= low <= found <= high <= 1
        assert (low, high) == (pytest.approx(1 - other_high), pytest.approx(1 - other_low))


def test_environments_are_averaged_and_have_to_be_the_same():
    x = Scores((np.array([1.0]), np.array([1.0])), ("a", "b"))
    y = Scores((np.array([0.0]), np.array([2.0])), ("a", "b"))
    assert probability_of_improvement(x, y) == pytest.approx(0.5)  # higher in a, lower in b
    assert np.isnan(improvement_interval(x, y)).all()
    with pytest.raises(ValueError, match=r"\['a', 'b'\] and \[''\]"):
        probability_of_improvement(x, Scores.of([[1.0]]))


def variance_at(p):
    """Return the variance of Hanley and McNeil 1982 for five runs and five."""
    # p(1-p)/mn + (n-1)(p/(2-p) - p^2)/mn + (m-1)(2p^2/(1+p) - p^2)/mn, here with m = n = 5.
    return (p * (1 - p) + 4 * (p / (2 - p) - p**2) + 4 * (2 * p**2 / (1 + p) - p**2)) / 25


def test_where_all_runs_are_higher_the_interval_ends_where_that_would_be_as_unlikely_as_it_may():
    x, y = Scores.of([[n + 10.0] for n in range(5)]), Scores.of([[float(n)] for n in range(5)])
    low, high = improvement_interval(x, y)
    assert 1 - low == pytest.approx(2.306 * math.sqrt(variance_at(low)), rel=1e-4)  # t of 8 degrees of freedom
    assert high == pytest.approx(1)


def test_where_all_runs_score_the_same_the_interval_is_as_wide_as_their_number_says():
    same = Scores.of([[1.0]] * 5)
    low, high = improvement_interval(same, same)
    assert 0.5 - low == pytest.approx(2.306 * math.sqrt(variance_at(low)), rel=1e-4)
    assert high == pytest.approx(1 - low)


def test_where_nearly_all_runs_are_higher_one_more_on_each_side_that_ties_says_how_far_chance_may_go():
    x, y = np.ones((5, 5)), np.zeros((5, 5))
    x[4, 4], y[4, 4] = 0.5, 0.75
    # One run is lower than one other on a fifth of the tasks. With ties, the six are higher by 11/12 (four of them),
    # 5.3/6 and 1/2 of the time: their mean is 5.05/6.
    found, means = 1 - 1 / 125, np.array([11 / 12] * 4 + [5.3 / 6, 1 / 2])
    factor = 2 * means.var(ddof=1) / 6 / variance_at(5.05 / 6)
    groups = [Scores.of(rows, same_tasks=True) for rows in (x, y)]
    low, high = improvement_interval(*groups)
    assert found - low == pytest.approx(2.306 * math.sqrt(factor * variance_at(low)), rel=1e-4)
    assert high - found == pytest.approx(2.306 * math.sqrt(factor * variance_at(high)), rel=1e-4)
    # In two environments alike, the variance is half of that, and there are 16 degrees of freedom.
    low, _ = improvement_interval(*(Scores(one.runs * 2, (*"a" * 5, *"b" * 5), same_tasks=True) for one in groups))
    assert found - low == pytest.approx(2.120 * math.sqrt(factor * variance_at(low) / 2), rel=1e-3)


def test_runs_that_vary_more_than_they_may_do_not_lengthen_it():
    x, y = Scores.of([[9.0], [9.0], [-9.0], [-9.0], [9.0]]), Scores.of([[float(n)] for n in range(5)])
    low, _ = improvement_interval(x, y)
    # Three of five are higher than all, and two lower. Only runs of x vary: there are 4 degrees of freedom.
    assert 0.6 - low == pytest.approx(2.776 * math.sqrt(variance_at(low)), rel=1e-3)


def test_tasks_on_which_runs_agree_shorten_it_and_environments_do_too():
    rng = np.random.default_rng(0)
    tasks = 5 * rng.normal(size=20)
    rows = [tasks + shift + 0.3 * rng.normal(size=(5, 20)) for shift in (0.2, 0.0)]
    by_task = np.diff(improvement_interval(*(Scores.of(row, same_tasks=True) for row in rows)))
    by_mean = np.diff(improvement_interval(*map(Scores.of, rows)))
    assert by_task < 0.7 * by_mean
    one = [Scores.of([[value] for value in rng.normal(size=5)]) for _ in range(2)]
    four = [Scores(runs.runs * 4, tuple(name for name in "abcd" for _ in range(5))) for runs in one]
    assert np.diff(improvement_interval(*four)) == pytest.approx(np.diff(improvement_interval(*one)) / 2, rel=0.35)


def planted(rng, difference, deviation, tasks):
    noise = (deviation * rng.normal(size=(5, 1)) + rng.normal(size=(5, len(tasks))) for _ in range(2))
    high, low = (tasks + values for values in noise)
    return high + difference, low


@pytest.mark.parametrize(
    ("same_tasks", "difference", "deviation", "widest"),
    [(False, 1.5, 2, 0.68), (False, 5, 2, 0.55), (True, 1.5, 2, 0.65), (True, 5, 2, 0.45), (True, 0.5, 0.3, 0.35)],
)
def test_intervals_of_five_runs_hold_the_truth_and_are_no_wider_than_need_be(same_tasks, difference, deviation, widest):
    tasks = 3 * np.random.default_rng(0).normal(size=10)
    # Two runs differ on a task by N(difference, 2 (deviation^2 + 1)), in their means by N(..., 2 (deviation^2 + 1/10)).
    spread = math.sqrt(2 * (deviation**2 + (1 if same_tasks else 0.1)))
    truth, held, widths = 0.5 * (1 + math.erf(difference / spread / math.sqrt(2))), 0, []
    for repetition in range(300):
        rows = planted(np.random.default_rng([3, repetition]), difference, deviation, tasks)
        low, high = improvement_interval(*(Scores.of(row, same_tasks=same_tasks) for row in rows))
        held += low <= truth <= high
        widths.append(high - low)
    assert held / 300 >= 0.92
    assert np.mean(widths) < widest

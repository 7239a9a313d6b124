import math
from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metaloom.pipeline.comparison import groups as comparison
from metaloom.pipeline.comparison.groups import Resampled, divisions, holm, permutation_test, runs_needed, smallest_p
from metaloom.pipeline.comparison.scores import Scores, interquartile_mean


def test_of_three_and_three_runs_that_are_apart_two_of_twenty_divisions_are_as_far_apart():
    test = permutation_test(Scores.of([[1.0], [2], [3]]), Scores.of([[11.0], [12], [13]]), np.random.default_rng(0))
    assert (test.p, test.exact, test.smallest) == (pytest.approx(2 / 20), True, pytest.approx(2 / 20))


def test_four_runs_and_four_that_are_apart_are_told_apart_by_one_score_each():
    # The interquartile mean leaves out the lowest of one and the highest of the other, which may change sides.
    test = permutation_test(
        Scores.of([[1.0], [2], [3], [4]]), Scores.of([[11.0], [12], [13], [14]]), np.random.default_rng(0)
    )
    assert test.p == pytest.approx(2 / 70) == pytest.approx(test.smallest)


def test_it_is_what_trying_all_divisions_one_by_one_gives():
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(4, 5)), 0.8 + rng.normal(size=(3, 5))
    rows, larger = np.concatenate([a, b]), 0
    observed = abs(float(interquartile_mean(Scores.of(a)) - interquartile_mean(Scores.of(b))))
    for side in combinations(range(7), 4):
        rest = [n for n in range(7) if n not in side]
        apart = abs(
            float(interquartile_mean(Scores.of(rows[[*side]]))) - float(interquartile_mean(Scores.of(rows[rest])))
        )
        larger += apart >= observed - 1e-12
    assert permutation_test(Scores.of(a), Scores.of(b), rng).p == pytest.approx(larger / 35)


def test_runs_change_sides_within_their_environment():
    x = Scores((np.array([1.0]), np.array([5.0])), ("a", "b"))
    y = Scores((np.array([0.0]), np.array([4.0])), ("a", "b"))
    assert divisions(x, y) == 4
    # All four divisions: both stay, both change, or one: the differences are 1, 1, 0 and 0.
    assert permutation_test(x, y, np.random.default_rng(0)).p == pytest.approx(0.5)
    x = Scores((np.array([5.0]), np.array([100.0])), ("a", "b"))
    y = Scores((np.array([0.0]), np.array([1.0]), np.array([90.0])), ("a", "a", "b"))
    # Interquartile means differ by 7 now, and by 7.5 after one of the other five divisions. Another 7 has closer means.
    test = permutation_test(x, y, np.random.default_rng(0))
    assert (test.p, test.exact, test.smallest) == (pytest.approx(2 / 6), True, pytest.approx(1 / 6))


def test_divisions_are_drawn_only_if_there_are_more_than_may_be_enumerated(monkeypatch):
    # The one run of x that scores 1 is on the side of two runs in 2 of 46 divisions; those of b are all alike.
    x = Scores((np.zeros(1), np.ones(1), np.zeros(1)), ("b", "a", "a"))
    y = Scores((np.zeros(1),) * 45, (*("a",) * 44, "b"))
    assert divisions(x, y) == 2 * 46 * 45 / 2
    for most, exact, error in ((2070, True, 1e-9), (2069, False, 0.015)):
        monkeypatch.setattr(comparison, "MOST_EXACT", most)
        test = permutation_test(x, y, np.random.default_rng(0))
        assert (test.exact, test.p) == (exact, pytest.approx(2 / 46, abs=error))


def test_with_many_runs_divisions_are_drawn_and_p_is_never_zero():
    rng = np.random.default_rng(0)
    test = permutation_test(Scores.of(rng.normal(size=(15, 1))), Scores.of(9 + rng.normal(size=(15, 1))), rng)
    assert (test.exact, test.p) == (False, pytest.approx(1 / 20001))


def test_if_groups_are_alike_p_is_below_a_twentieth_one_time_in_twenty():
    rng = np.random.default_rng(0)
    found = [
        permutation_test(Scores.of(rng.exponential(size=(4, 2))), Scores.of(rng.exponential(size=(5, 2))), rng).p
        for _ in range(1000)
    ]
    # Of 126 divisions, 6 make at most 0.05: 0.0476 of the time, with a standard error of 0.007.
    assert np.mean(np.array(found) <= 0.05) == pytest.approx(6 / 126, abs=0.021)


@settings(max_examples=30)
@given(
    st.lists(st.integers(-8, 8), min_size=6, max_size=8),
    st.sampled_from([1e-9, 1.0, 0.3]),
    st.sampled_from([0, 1e4, 1e11]),
)
def test_p_is_that_of_exact_arithmetic_wherever_scores_are_and_however_small(values, unit, offset):
    offset *= unit
    runs = [Fraction(value) for value in values]
    found = permutation_test(
        Scores.of([[value * unit + offset] for value in values[:3]]),
        Scores.of([[value * unit + offset] for value in values[3:]]),
        np.random.default_rng(0),
    )
    assert found.p == pytest.approx(exact_p(runs[:3], runs[3:]))


def exact_p(x, y):
    """The p of runs with one score each, in fractions."""
    apart = {}
    for side in combinations(range(len(x + y)), len(x)):
        chosen = [(x + y)[i] for i in side]
        others = [(x + y)[i] for i in range(len(x + y)) if i not in side]
        apart[side] = tuple(abs(measure(chosen) - measure(others)) for measure in (exact_iqm, exact_mean))
    return sum(found >= apart[tuple(range(len(x)))] for found in apart.values()) / len(apart)


def exact_mean(scores):
    return sum(scores, Fraction()) / len(scores)


def exact_iqm(scores):
    quarter, total = Fraction(1, 4), Fraction()
    for i, score in enumerate(sorted(scores)):
        inside = min(Fraction(i + 1, len(scores)), 3 * quarter) - max(Fraction(i, len(scores)), quarter)
        total += max(inside, Fraction()) * score
    return 2 * total


def test_three_runs_and_three_show_nothing_where_returns_are_large():
    rng = np.random.default_rng(0)
    for _ in range(40):
        low, high = 1e6 + rng.normal(size=(3, 7)), 1e6 + 5 + rng.normal(size=(3, 7))
        assert permutation_test(Scores.of(high), Scores.of(low), rng).p == 0.1


def test_scores_that_differ_in_their_last_bits_are_equal():
    x, y = np.full((4, 1), 500.0), np.full((4, 1), np.nextafter(500.0, 0))
    assert permutation_test(Scores.of(x), Scores.of(y), np.random.default_rng(0)).p == 1


def test_holm_by_hand():
    # In order .01 .02 .04: times 3, 2, 1 makes .03 .04 .04.
    assert holm([0.04, 0.01, 0.02]) == pytest.approx([0.04, 0.03, 0.04])
    assert holm([0.5, 0.9]) == [1, 1]
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6))
def test_holm_is_between_the_p_and_that_of_bonferroni_and_keeps_the_order(p_values):
    adjusted = holm(p_values)
    for p, after in zip(p_values, adjusted, strict=True):
        assert p - 1e-12 <= after <= min(1, len(p_values) * p) + 1e-12
    assert [adjusted[n] for n in np.argsort(p_values, kind="stable")] == sorted(adjusted)


@pytest.mark.parametrize(("pairs", "runs"), [(1, 4), (2, 5), (3, 5), (10, 6)])
def test_the_runs_needed_are_the_fewest_that_can_show_an_order(pairs, runs):
    def least(n):
        return 2 * pairs / math.comb(2 * n, n)

    assert runs_needed(pairs) == runs
    assert least(runs) <= 0.05 < least(runs - 1)
    rising = Scores.of([[float(n)] for n in range(runs)])
    assert smallest_p(rising, Scores.of([[n + 100.0] for n in range(runs)])) == pytest.approx(least(runs) / pairs)


def planted(difference, runs=5, seed=0):
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(2, runs, 1)) + rng.normal(size=(2, runs, 10))
    return {"high": Scores.of(rows[0] + difference), "low": Scores.of(rows[1])}


def test_a_planted_difference_is_shown_and_none_is_not():
    (pair,) = Resampled(planted(5.0), 0, 1000).pairs()
    assert (pair.a, pair.shown, pair.attainable) == ("high", True, True)
    assert pair.difference.low < 5 < pair.difference.high
    expected = [float(interquartile_mean(scores)) for scores in planted(5.0).values()]
    assert pair.difference.value == pytest.approx(expected[0] - expected[1])
    assert (pair.difference.low + pair.difference.high) / 2 == pytest.approx(pair.difference.value)
    assert pair.improvement.value == 1
    assert pair.improvement.low < pair.improvement.high == 1  # every run of one is higher, as others might not be
    (pair,) = Resampled(planted(0.0), 0, 1000).pairs()
    assert (pair.shown, pair.attainable) == (False, True)
    assert pair.difference.low < 0 < pair.difference.high


def test_three_runs_can_show_nothing_however_large_the_difference():
    (pair,) = Resampled(planted(1000.0, runs=3), 0, 500).pairs()
    assert (pair.shown, pair.attainable) == (False, False)


def test_a_p_value_of_exactly_5_percent_is_significant():
    groups = {"high": Scores.of([[100.0]]), "low": Scores.of([[float(n)] for n in range(19)])}
    (pair,) = Resampled(groups, 0, 200).pairs()
    assert (pair.adjusted_p, pair.smallest_p) == (0.05, 0.05)
    assert (pair.a, pair.shown, pair.attainable) == ("high", True, True)


def test_a_pair_is_attainable_where_others_that_are_shown_leave_it_the_level():
    rng = np.random.default_rng(0)
    groups = {
        name: Scores.of(shift + rng.normal(size=(runs, 3)))
        for name, shift, runs in (("a", 200.0, 4), ("b", 100.0, 4), ("c", 0.0, 8))
    }
    pairs = {(pair.a, pair.b): pair for pair in Resampled(groups, 0, 200).pairs()}
    # 4 and 4 runs have p = 2/70 at best: too much for a third of 5%, but the other two pairs are shown before.
    assert pairs["a", "b"].smallest_p == pytest.approx(2 / 70)
    assert all(pair.attainable and pair.shown for pair in pairs.values())


def test_intervals_of_a_group_do_not_depend_on_the_others_or_the_order_of_groups():
    groups = planted(1.0)
    both = Resampled(groups, 3, 500)
    alone = Resampled({"low": groups["low"]}, 3, 500)
    assert both.interquartile_mean("low") == alone.interquartile_mean("low")
    assert both.pairs() == Resampled(dict(reversed(groups.items())), 3, 500).pairs()
    assert Resampled(groups, 4, 500).interquartile_mean("low") != both.interquartile_mean("low")


def test_profiles_stay_between_none_and_all_and_curves_within_their_bands():
    groups = planted(2.0)
    resampled = Resampled(groups, 0, 500)
    profile = resampled.profile("high", np.array([-100.0, 100.0]))
    assert (profile.values == [1, 0]).all()
    assert (profile.low >= 0).all()
    assert (profile.high <= 1).all()
    curve = resampled.curve("high", np.stack([groups["high"].run_means, groups["high"].run_means + 1], axis=1))
    assert curve.values[1] - curve.values[0] == pytest.approx(1)
    assert (curve.low < curve.values).all()
    assert (curve.values < curve.high).all()


def test_means_and_fractions_have_intervals_of_the_width_that_their_runs_say():
    half, few = Scores.of([[float(n % 2)] for n in range(16)]), Scores.of([[0.0], [0.0], [0.0], [1.0]])
    resampled = Resampled({"half": half, "few": few}, 0, 2000)
    mean, profile = resampled.mean("half"), resampled.profile("half", np.array([0.5]))
    reach = 2.131 * math.sqrt(0.5 * 0.5 / 15)  # t of 15 degrees of freedom
    assert (mean.value, mean.low, mean.high) == pytest.approx((0.5, 0.5 - reach, 0.5 + reach), abs=0.015)
    assert (*profile.values, *profile.low, *profile.high) == pytest.approx((mean.value, mean.low, mean.high))
    profile = resampled.profile("few", np.array([0.5]))  # 1/4 ± 3.182 / 4 is more than is possible
    assert (*profile.values, *profile.low, *profile.high) == (0.25, 0, 1)

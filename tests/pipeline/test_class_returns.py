import math

import numpy as np
import pytest

from metaloom.pipeline.estimation.statistics import class_returns


def test_means_and_standard_errors_are_those_worked_out_by_hand():
    # a: 1, 3: mean 2, s = √2, standard error √2/√2 = 1. b: 10, 10, 16: mean 12, s = √12, standard error 2.
    found = class_returns(np.array([10.0, 1.0, 10.0, 3.0, 16.0]), np.array([1, 0, 1, 0, 1]), ("a", "b"))
    assert found.num_tasks == (2, 3)
    assert found.estimates == (pytest.approx((2, 1)), pytest.approx((12, 2)))
    assert found.balanced == pytest.approx((7, math.sqrt(1 + 4) / 2))


def test_the_balanced_mean_does_not_depend_on_how_many_tasks_of_a_class_were_drawn():
    few = class_returns(np.array([1.0, 5.0, 5.0]), np.array([0, 1, 1]), ("a", "b"))
    many = class_returns(np.array([1.0, 1.0, 1.0, 5.0]), np.array([0, 0, 0, 1]), ("a", "b"))
    assert few.balanced.mean == many.balanced.mean == 3


def test_a_class_without_a_task_has_no_mean_and_one_task_has_no_standard_error():
    found = class_returns(np.array([4.0, 2.0, 3.0]), np.array([0, 2, 2]), ("a", "b", "c"))
    assert found.estimates[0].mean == 4
    assert math.isnan(found.estimates[0].standard_error)
    assert math.isnan(found.estimates[1].mean)
    assert math.isnan(found.balanced.mean)


def test_the_standard_error_is_how_much_the_balanced_mean_varies():
    rng, classes = np.random.default_rng(0), np.array([0] * 3 + [1] * 12)
    found = [
        class_returns(rng.normal([0] * 3 + [9] * 12, [1] * 3 + [4] * 12), classes, ("a", "b")).balanced
        for _ in range(2000)
    ]
    # Var = (1/3 + 16/12) / 4 exactly; of 2,000 estimates the mean square is within 5%.
    expected = (1 / 3 + 16 / 12) / 4
    assert np.var([mean for mean, _ in found]) == pytest.approx(expected, rel=0.1)
    assert np.mean([error**2 for _, error in found]) == pytest.approx(expected, rel=0.05)

import numpy as np
import pytest

from metaloom.pipeline.estimation.statistics import bootstrap, interquartile_mean, mean


def test_the_interquartile_mean_is_the_mean_of_the_middle_half():
    values = np.array([100.0, 3, 1, 2, -50, 4, 5, 0])  # the middle four of eight
    assert interquartile_mean(values) == pytest.approx((1 + 2 + 3 + 4) / 4)


def test_values_at_a_quartile_count_in_part():
    # Of six values the middle half is [1.5, 4.5): half of the second, the third and fourth, half of the fifth.
    assert interquartile_mean(np.array([0.0, 1, 2, 10, 20, 100])) == pytest.approx((0.5 * 1 + 2 + 10 + 0.5 * 20) / 3)


@pytest.mark.parametrize("values", [[3.0], [3.0, 5.0]])
def test_of_one_or_two_values_it_is_the_mean(values):
    assert interquartile_mean(np.array(values)) == pytest.approx(np.mean(values))


def test_it_works_along_the_last_axis_and_does_not_depend_on_order():
    values = np.random.default_rng(0).normal(size=(3, 7))
    assert interquartile_mean(values).shape == (3,)
    np.testing.assert_allclose(interquartile_mean(values[:, ::-1]), interquartile_mean(values))


def test_an_outlier_does_not_move_it():
    values = np.arange(12.0)
    far = values.copy()
    far[-1] = 1e9
    assert interquartile_mean(far) == interquartile_mean(values)


def test_the_estimate_is_of_the_tasks_mean_returns():
    returns = np.array([[0.0, 2.0], [10.0, 10.0], [20.0, 22.0], [40.0, 40.0]])
    rng = np.random.default_rng(0)
    assert bootstrap(returns, mean, rng).estimate == pytest.approx((1 + 10 + 21 + 40) / 4)
    assert bootstrap(returns, interquartile_mean, rng).estimate == pytest.approx((10 + 21) / 2)


def test_equal_returns_leave_no_doubt():
    assert bootstrap(np.full((5, 3), -2.0), interquartile_mean, np.random.default_rng(0)) == (-2, -2, -2)


def test_a_single_episode_has_a_mean_and_no_interval():
    interval = bootstrap(np.array([[5.0]]), mean, np.random.default_rng(0))
    assert interval.estimate == 5
    assert np.isnan([interval.low, interval.high]).all()
    # With a second task, a mean of 1 or of 3 comes up in a quarter of the draws each.
    for returns in ([[1.0], [3.0]], [[1.0, 1.0], [3.0, 3.0]]):
        assert bootstrap(np.array(returns), mean, np.random.default_rng(0)) == (2, 1, 3)


def test_one_task_is_as_uncertain_as_its_episodes():
    returns = np.random.default_rng(1).normal(size=(1, 400))
    _, low, high = bootstrap(returns, mean, np.random.default_rng(0))
    # The standard error of a mean of 400 is a twentieth of their deviation; a 95% interval is 3.92 of them wide.
    assert high - low == pytest.approx(3.92 * returns.std() / 20, rel=0.1)


def test_the_interval_holds_the_truth_nineteen_times_in_twenty():
    rng = np.random.default_rng(3)
    hits = 0
    for _ in range(200):
        # Tasks differ by 1, episodes of a task by 0.5, around 7.
        returns = 7 + rng.normal(size=(30, 1)) + 0.5 * rng.normal(size=(30, 5))
        _, low, high = bootstrap(returns, mean, rng, resamples=200)
        hits += low <= 7 <= high
    assert 180 <= hits <= 200


def test_one_estimate_in_forty_is_beyond_either_end_of_the_interval():
    def numbered(values):
        return np.arange(len(values)) if values.ndim > 1 else np.float64(7)

    interval = bootstrap(np.zeros((4, 3)), numbered, np.random.default_rng(0), resamples=41)
    assert interval == pytest.approx((7, 1, 39))  # of 0 to 40


def test_resamples_in_blocks_are_as_many_as_asked_for(monkeypatch):
    import metaloom.pipeline.estimation.statistics

    seen = []
    monkeypatch.setattr(metaloom.pipeline.estimation.statistics, "_DRAWS_AT_ONCE", 40)

    def count(values):
        seen.append(values.shape)
        return values.mean(axis=-1)

    bootstrap(np.zeros((4, 3)), count, np.random.default_rng(0), resamples=10)
    assert [shape for shape in seen if len(shape) == 2] == [(3, 4), (3, 4), (3, 4), (1, 4)]
    seen.clear()
    bootstrap(np.zeros((4, 3)), count, np.random.default_rng(0))
    assert sum(shape[0] for shape in seen if len(shape) == 2) == 2000

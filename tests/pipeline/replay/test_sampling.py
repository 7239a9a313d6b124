from collections import Counter
from itertools import combinations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from metaloom.stages.sample_transitions import draw_distinct, draw_with_replacement


def test_draws_cover_all_numbers_up_to_the_largest_uniform() -> None:
    largest = np.nextafter(1.0, 0.0)
    for size in (1, 2, 3, 7, 10**6 - 1, 2**31 - 1, 2**40 + 1):
        assert draw_with_replacement(np.array([0.0, largest]), size).tolist() == [0, size - 1]


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_distinct_draws_are_different_numbers_below_their_size(data) -> None:
    count = data.draw(st.integers(1, 6))
    sizes = np.array(data.draw(st.lists(st.integers(count, count + 4), min_size=1, max_size=5)))
    uniforms = np.random.default_rng(data.draw(st.integers(0, 99))).random((len(sizes), count))
    drawn = draw_distinct(uniforms, sizes)
    for numbers, size in zip(drawn.tolist(), sizes.tolist(), strict=True):
        assert len(set(numbers)) == count
        assert set(numbers) <= set(range(size))


def test_every_set_is_drawn_equally_often() -> None:
    drawn = draw_distinct(np.random.default_rng(3).random((9000, 2)), np.full(9000, 5))
    counts = Counter(frozenset(numbers) for numbers in drawn.tolist())
    assert set(counts) == {frozenset(pair) for pair in combinations(range(5), 2)}
    # Ten sets: 27.88 is exceeded with probability 0.001 at 9 degrees of freedom.
    assert sum((n - 900) ** 2 / 900 for n in counts.values()) < 27.88


def test_a_set_depends_on_its_own_numbers_only() -> None:
    uniforms = np.random.default_rng(0).random((10_000, 3))
    sizes = np.random.default_rng(1).integers(3, 9, 10_000)
    whole = draw_distinct(uniforms, sizes)
    assert np.array_equal(draw_distinct(uniforms[5000:5005], sizes[5000:5005]), whole[5000:5005])


def test_no_sets_are_no_numbers() -> None:
    assert draw_distinct(np.empty((0, 3)), np.empty(0, np.int64)).shape == (0, 3)

import subprocess
import sys

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from metaloom.pipeline.seeding import generator, seed_for

positions = st.lists(st.integers(0, 2**40), max_size=4).map(tuple)


def test_a_seed_is_the_same_in_every_process():
    code = "from metaloom.pipeline.seeding import seed_for; print(seed_for(1, 'tasks', 2, 3))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert int(other) == seed_for(1, "tasks", 2, 3)


@given(positions, positions)
def test_different_positions_have_different_seeds(a, b):
    assert (seed_for(1, "resets", *a) == seed_for(1, "resets", *b)) == (a == b)


def test_streams_and_runs_are_independent():
    seeds = {seed_for(run, stream, 0) for run in range(3) for stream in ("tasks", "resets", "actions")}
    assert len(seeds) == 9


def test_a_generator_is_uniform_whatever_its_position():
    draws = np.concatenate([generator(3, "actions", i).random(10) for i in range(2000)])
    # The mean of 20,000 uniform draws has standard deviation 1 / sqrt(12 * 20000) = 0.002.
    assert abs(draws.mean() - 0.5) < 0.01


def test_two_generators_of_one_position_draw_the_same_numbers():
    a, b = (generator(5, "actions", 1, 2, 3).standard_normal(7) for _ in range(2))
    assert (a == b).all()

import subprocess
import sys
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaloom.pipeline.dataflow.stage import At
from metaloom.pipeline.seeding import OWN, Stream, generator, own_generator, seed_for

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


@given(st.sampled_from(get_args(Stream)), st.text(st.characters(codec="utf-8"), max_size=12), positions, positions)
def test_a_stream_of_a_plug_in_equals_none_of_ours_whatever_its_name(stream, name, a, b):
    if not name or not name.isprintable():  # such as one that goes on with what could be a position
        with pytest.raises(ValueError, match="a stream name must consist of printable characters"):
            own_generator(1, name, *a)
        return
    own = own_generator(1, name, *a).bit_generator.state["state"]["key"].tolist()
    assert own != generator(1, stream, *b).bit_generator.state["state"]["key"].tolist()
    assert own != generator(1, name, *a).bit_generator.state["state"]["key"].tolist()
    assert (own == own_generator(1, name, *b).bit_generator.state["state"]["key"].tolist()) == (a == b)
    assert not any(ours.startswith(OWN) for ours in get_args(Stream))


def test_the_stream_of_a_stage_belongs_to_its_name_and_position():
    places = [
        At(*place, training, task)
        for place in ((1, 2, 0), (1, 2, 1), (1, 3, 0), (2, 2, 0))
        for training in (True, False)
        for task in (0, 1)
    ]
    draws = [at.generator(name).random() for at in places for name in ("noise", "other")]
    assert len(set(draws)) == 32
    assert At(1, 2, training=False).generator("noise").random() == draws[4]
    after_training = own_generator(seed_for(1, "evaluation", 2, 0, 0) // 2, "noise")  # as stored evaluations drew
    assert after_training.random() == draws[4]


def test_a_generator_is_uniform_whatever_its_position():
    draws = np.concatenate([generator(3, "actions", i).random(10) for i in range(2000)])
    # The mean of 20,000 uniform draws has standard deviation 1 / sqrt(12 * 20000) = 0.002.
    assert abs(draws.mean() - 0.5) < 0.01


def test_two_generators_of_one_position_draw_the_same_numbers():
    a, b = (generator(5, "actions", 1, 2, 3).standard_normal(7) for _ in range(2))
    assert (a == b).all()

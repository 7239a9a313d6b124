"""Trials of the last iterations by number."""

import numpy as np

from metaloom.pipeline.replay.index import TrialBuffer


def test_trials_are_numbered_round_by_round_and_only_drawn_rounds_are_read():
    read = []

    def rounds(number):
        read.append(number)
        return f"round {number}"

    buffer = TrialBuffer([3, 2, 4], rounds)
    assert len(buffer) == 9
    taken = buffer.take(np.array([8, 0, 2, 5]))
    assert taken == [("round 2", 3), ("round 0", 0), ("round 0", 2), ("round 2", 0)]
    assert set(read) == {0, 2}

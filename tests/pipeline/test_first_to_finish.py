"""Success as Meta-World's evaluator counts it, by hand and by that evaluator itself."""

import importlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaloom.pipeline.estimation.statistics import COUNTED_EPISODES, first_to_finish, official_rates

HORIZON = 500


def test_failures_are_over_too_late_to_count():
    success = np.zeros((4, 3), bool)
    success[2] = True
    lengths = np.where(success, 50, HORIZON)
    assert first_to_finish(lengths, success) == 1.0
    assert success.mean() == 0.25


def test_without_any_success_the_first_three_are_failures():
    assert first_to_finish(np.full((4, 3), HORIZON), np.zeros((4, 3), bool)) == 0.0


def test_episodes_of_an_environment_follow_each_other_and_ties_go_to_the_first_environment():
    # Over at 40, 540, 1040; at 500, 600, 1100; at 500, 1000, 1500: the first three are at 40, 500 and 500.
    lengths = np.array([[40, 500, 500], [500, 100, 500], [500, 500, 500]])
    success = lengths < HORIZON
    assert first_to_finish(lengths, success) == pytest.approx(1 / 3)
    # All alike: environment 0 finishes its second episode with the others' second, after three that are over.
    assert first_to_finish(np.full((3, 3), 7), np.array([[1, 0, 0], [1, 0, 0], [0, 1, 1]], bool)) == pytest.approx(
        2 / 3
    )


def test_fewer_test_episodes_than_may_count_are_refused():
    with pytest.raises(ValueError, match="got 2 episodes per environment; expected 3"):
        first_to_finish(np.ones((4, 2)), np.ones((4, 2), bool))


def test_the_tasks_of_a_class_take_part_in_whole_rounds():
    # Five classes: rounds of four. Class 0 has nine tasks, of which the last is left over; class 1 has too few.
    of = np.array([0] * 9 + [1] * 3)
    success = np.zeros((12, 3), bool)
    success[[4, 8, 9]] = True  # one in the second round of class 0, the one left over, one of class 1
    lengths = np.where(success, 50, HORIZON)
    assert official_rates(lengths, success, of, [0, 1, 2, 3, 4])[0] == 0.5
    assert np.isnan(official_rates(lengths, success, of, [0, 1, 2, 3, 4])[1:]).all()
    # A single class has rounds of 20; with 25 classes, each task is a round.
    first = np.zeros(20, np.int64)
    assert official_rates(np.full((20, 3), 50), np.ones((20, 3), bool), first, [0]) == [1.0]
    assert official_rates(lengths, success, np.arange(12), range(25))[3:5] == [0.0, 1.0]


class Recorded:
    """A vector environment, as far as the package's evaluator asks it, whose episodes are given beforehand."""

    def __init__(self, lengths, success):
        self.num_envs, self._lengths, self._success = len(lengths), lengths, success

    def get_attr(self, name):
        return {"terminate_on_success": [True] * self.num_envs, "task_name": ["SawyerReachEnvV3"] * self.num_envs}[name]

    def call(self, name, *arguments):
        assert (name, arguments) == ("toggle_terminate_on_success", (True,))

    def reset(self):
        self._episode, self._t = np.zeros(self.num_envs, int), np.zeros(self.num_envs, int)
        return np.zeros((self.num_envs, 39)), {}

    def step(self, actions):
        del actions
        self._t += 1
        every = np.arange(self.num_envs)
        over = self._t == self._lengths[every, self._episode]
        success = self._success[every, self._episode]
        self._episode[over] += 1
        self._t[over] = 0
        final = {"episode": {"r": np.zeros(self.num_envs)}, "success": success.astype(float)}
        zeros = np.zeros(self.num_envs)
        return np.zeros((self.num_envs, 39)), zeros, over & success, over & ~success, {"final_info": final}


class Still:
    """An agent of the package's that does nothing."""

    def eval_action(self, observations):
        return np.zeros((len(observations), 4))

    def reset(self, env_mask):
        del env_mask


@given(st.data())
def test_the_rate_is_what_the_package_reports(data):
    pytest.importorskip("metaworld", reason="`make metaworld` installs it")
    n = data.draw(st.integers(1, 5))
    one = st.one_of(st.none(), st.integers(1, 9))
    found = data.draw(st.lists(st.lists(one, min_size=4, max_size=4), min_size=n, max_size=n))
    success = np.array([[x is not None for x in row] for row in found])
    lengths = np.array([[x or 10 for x in row] for row in found])
    evaluation = importlib.import_module("metaworld.evaluation").evaluation
    rate, _, _, _ = evaluation(Still(), Recorded(lengths, success), COUNTED_EPISODES)
    assert first_to_finish(lengths, success) == pytest.approx(rate)
    assert first_to_finish(lengths[:, :3], success[:, :3]) == pytest.approx(rate)

import numpy as np
import pytest

import storage
from flows.errors import UsageError
from flows.evaluate import evaluate
from flows.train import train
from flows.workers import Backend


@pytest.fixture(scope="module")
def stored(tmp_path_factory, tiny_config):
    # Targets and starting states of this environment are drawn from continuous distributions.
    folder = tmp_path_factory.mktemp("evaluate") / "run"
    train(tiny_config(env="half-cheetah-vel", iterations=2), folder, backend=Backend(workers=0))
    return folder


def test_tasks_and_starts_are_none_of_those_of_training(stored):
    outcome = evaluate(stored)
    run = storage.open_run(stored)
    for iteration in run:
        assert not np.isin(outcome.tasks.params, iteration.tasks().params).any()
        for k, episodes in enumerate(outcome.rounds):
            assert not np.isin(episodes.observations[:, :, 0], iteration.rollouts(k).observations[:, :, 0]).any()


def test_the_seed_draws_other_tasks_and_starts_and_the_same_one_the_same(stored):
    first, again, other = (evaluate(stored, seed=seed) for seed in (5, 5, 6))
    assert np.array_equal(first.tasks.params, again.tasks.params)
    assert np.array_equal(first.rounds[1].rewards, again.rounds[1].rewards)
    assert not np.isin(first.tasks.params, other.tasks.params).any()
    starts = [outcome.rounds[0].observations[:, :, 0] for outcome in (first, other)]
    assert not np.isin(*starts).any()


@pytest.mark.parametrize("seed", [-1, 2**63, 10**20])
def test_a_seed_that_no_run_can_have_is_refused(stored, seed):
    with pytest.raises(UsageError, match=r"required one from 0 to 2\*\*63 - 1"):
        evaluate(stored, seed=seed)


def test_more_updates_than_the_run_has_are_refused_with_the_command_that_makes_them(stored):
    with pytest.raises(UsageError, match=r"the run has 2.*--iterations 3"):
        evaluate(stored, 3)
    assert evaluate(stored, 2).iteration == 2

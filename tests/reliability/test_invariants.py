"""Invariants between the stored batches of a run, recomputed from the disk alone."""

import pickle

import numpy as np
import pytest
import torch

from metaloom import storage
from metaloom.flows.graph.run_stages import config_of, stages_of
from metaloom.flows.rollouts.workers import Backend
from metaloom.pipeline.nn.distributions import DiagGaussian
from metaloom.pipeline.policies.build import GaussianPolicy
from metaloom.storage import StageRef

POST = {StageRef(0, "collect_rollouts", 1), StageRef(0, "process_samples", 1)}


@pytest.fixture(scope="module")
def run(tmp_path_factory, train_tiny):
    path = train_tiny(tmp_path_factory.mktemp("invariants") / "run", max_episode_steps=20, num_tasks=3)
    return storage.open_run(path)


@pytest.fixture(scope="module")
def stages(run):
    with stages_of(config_of(run), Backend(workers=0)) as stages:
        yield stages


def same(found, expected):
    return storage.digest(found) == storage.digest(expected)


def test_the_adapted_parameters_follow_from_the_stored_pre_update_batch_alone(run, stages):
    ref = StageRef(0, "adapt")
    assert not POST.intersection(stages.inputs(ref))
    assert same(stages.compute(ref, run), run[0].adapted(0))


def test_no_post_update_batch_is_among_what_the_adapted_parameters_were_made_from(run):
    for i in run.iterations:
        ancestors, waiting = set(), [StageRef(i, "adapt")]
        while waiting:
            ref = waiting.pop()
            new = {item.ref for item in run.record(ref).inputs if item.ref.iteration == i} - ancestors
            ancestors |= new
            waiting.extend(new)
        assert ancestors
        assert all(ref.step == 0 for ref in ancestors)


@pytest.mark.parametrize("k", [0, 1])
def test_the_stored_acting_distribution_is_that_of_the_parameters_that_acted(run, stages, k):
    episodes, learner = run[0].rollouts(k), run[0].learner().params
    policy = GaussianPolicy(stages.setup, stages.config.policy)
    for b in range(3):
        acting = {name: value[b] for name, value in run[0].adapted(0).params.items()} if k else learner
        real = run[0].samples(k).mask[b].astype(bool)
        actions = torch.from_numpy(episodes.actions[b][real])
        found = policy.distribution(
            {name: torch.from_numpy(value) for name, value in acting.items()},
            torch.from_numpy(episodes.observations[b, :, :-1][real]),
        )
        mean, log_std = episodes.behavior["mean"][b][real], episodes.behavior["log_std"][b]
        stored = DiagGaussian(torch.from_numpy(mean), torch.from_numpy(log_std))
        assert np.allclose(found.mean, mean, atol=1e-6)
        assert np.allclose(found.log_prob(actions), stored.log_prob(actions), atol=1e-4)


def test_the_post_update_policy_acts_differently_from_the_learner(run, stages):
    adapted, learner = run[0].adapted(0).params, run[0].learner().params
    assert all(not np.array_equal(adapted[name][b], learner[name]) for name in learner for b in range(3))


def test_both_rounds_of_an_iteration_are_sampled_in_the_same_tasks(run):
    tasks = run[0].tasks()
    for k in (0, 1):
        assert [item.ref for item in run.record(StageRef(0, "collect_rollouts", k)).inputs].count(
            StageRef(0, "sample_tasks")
        ) == 1
    rows = run.episodes(0).to_pandas()
    for name, column in zip(tasks.names, tasks.params.T, strict=True):
        assert (rows[f"task_{name}"] == column[rows["task"]]).all()


def test_tasks_come_back_from_pickling_and_from_the_disk_as_they_were(run):
    tasks = run[0].tasks()
    again = pickle.loads(pickle.dumps(tasks))
    assert same(again, tasks)
    assert (again.names, again.units) == (tasks.names, tasks.units)


def test_padding_is_zero_and_terms_add_up_to_rewards(run):
    for i in run.iterations:
        for k in (0, 1):
            episodes, samples = run[i].rollouts(k), run[i].samples(k)
            padding = samples.mask == 0
            assert (np.arange(episodes.rewards.shape[2]) < episodes.lengths[..., None]).astype("f4").tolist() == (
                samples.mask.tolist()
            )
            assert not episodes.rewards[padding].any()
            assert not samples.advantages[padding].any()
            assert np.allclose(sum(episodes.reward_terms.values()), episodes.rewards, atol=1e-6)

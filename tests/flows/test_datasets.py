"""Stored episodes as a torch Dataset: every item is what the run holds, whoever loads it in whatever order."""

import multiprocessing
import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader

import metaloom
from metaloom import storage
from metaloom.flows.errors import UsageError


@pytest.fixture(scope="module")
def run(tmp_path_factory, copy_tiny_run):
    return metaloom.open_run(copy_tiny_run(tmp_path_factory.mktemp("datasets") / "run"))


def test_transitions_are_the_real_steps_in_the_order_of_the_table(run):
    dataset, steps = run.dataset("transitions"), run.steps()
    assert len(dataset) == steps.num_rows
    items = dataset[range(len(dataset))]
    for name in ("iteration", "step", "task", "episode", "t", "reward", "terminated", "truncated"):
        assert items[name].tolist() == steps[name].to_pylist(), name
    for name in ("observation", "action"):
        assert np.array_equal(items[name], np.array(steps[name].to_pylist(), np.float32))
    follows = (items["t"][1:] > 0).numpy()
    assert np.array_equal(items["next_observation"][:-1][follows], items["observation"][1:][follows])
    last = items["t"].numpy() == 9
    assert np.array_equal(items["next_observation"][last][0], run[0].rollouts(0).observations[0, 0, 10])


def test_episodes_are_those_of_the_batches_with_their_task(run):
    dataset = run.dataset("episodes", iterations=[2], steps=1)
    episodes, tasks = run[2].rollouts(1), run[2].tasks()
    assert len(dataset) == episodes.real.sum() == 12
    for index in (0, 7, 11):
        b, e = divmod(index, 3)
        item = dataset[index]
        assert torch.equal(item["observations"], torch.from_numpy(episodes.observations[b, e]))
        assert torch.equal(item["rewards"], torch.from_numpy(episodes.rewards[b, e]))
        assert torch.equal(item["task_params"], torch.from_numpy(tasks.params[b]))
        assert [int(item[name]) for name in ("iteration", "step", "task", "episode")] == [2, 1, b, e]
        assert int(item["length"]) == episodes.lengths[b, e]


def test_a_trial_is_all_that_a_task_saw_in_an_iteration(run):
    dataset = run.dataset("trials")
    assert len(dataset) == 3 * 4
    trial = dataset[1 * 4 + 3]
    expected = np.concatenate([run[1].rollouts(k).actions[3] for k in (0, 1)])
    assert np.array_equal(trial["actions"], expected)
    assert trial["step"].tolist() == [0, 0, 0, 1, 1, 1]
    assert trial["episode"].tolist() == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize("unit", ["transitions", "episodes", "trials"])
def test_workers_give_the_same_batches_as_none_and_every_item_once(run, unit):
    dataset = run.dataset(unit)
    # A fork of this process inherits what earlier tests left to do at exit: of Prefect's log worker, an error.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["metaloom.flows.datasets"])

    def batches(**workers):
        sampler = BatchSampler(dataset.sampler(seed=3, pool=5), 7, drop_last=False)
        return [*DataLoader(dataset, sampler=sampler, batch_size=None, **workers)]

    alone, with_workers = batches(), batches(num_workers=2, multiprocessing_context=context)
    assert len(alone) == len(with_workers) == -(-len(dataset) // 7)
    for one, other in zip(alone, with_workers, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
    order = [*dataset.sampler(seed=3, pool=5)]
    assert sorted(order) == [*range(len(dataset))]
    assert order != sorted(order)


def test_workers_that_are_spawned_open_the_run_themselves(run):
    dataset = run.dataset("transitions", steps=1)
    whole = dataset[range(len(dataset))]
    sent = pickle.dumps(dataset)
    assert len(sent) < 10_000  # nothing of what was read
    again = pickle.loads(sent)
    assert all(torch.equal(values, again[range(len(again))][name]) for name, values in whole.items())
    loader = DataLoader(dataset, batch_size=64, num_workers=1, multiprocessing_context="spawn")
    assert torch.equal(torch.cat([batch["reward"] for batch in loader]), whole["reward"])


@pytest.mark.parametrize("unit", ["transitions", "episodes", "trials"])
def test_the_default_loader_reads_a_batch_at_once_and_stacks_it_as_a_list_of_indices_does(run, unit, monkeypatch):
    dataset = run.dataset(unit)
    asked, get = [], type(dataset).__getitem__
    monkeypatch.setattr(type(dataset), "__getitem__", lambda self, index: asked.append(index) or get(self, index))
    order = [5, 0, 3, 3]
    (loaded,) = DataLoader(dataset, batch_size=4, sampler=order)
    assert asked == [order]
    expected = dataset[order]
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], values) for name, values in expected.items())
    with pytest.raises(IndexError, match="expected 0 to"):
        dataset.__getitems__([0, len(dataset)])


def test_the_order_depends_on_seed_and_epoch_and_reads_every_part_once(run, monkeypatch):
    dataset = run.dataset("transitions")
    sampler = dataset.sampler(seed=1, pool=4)
    first = [*sampler]
    assert [*dataset.sampler(seed=1, pool=4)] == first != [*dataset.sampler(seed=2, pool=4)]
    sampler.set_epoch(1)
    assert [*sampler] != first
    sampler.set_epoch(0)
    assert [*sampler] == first
    assert [*dataset.sampler()] == [*dataset.sampler(seed=0)]
    assert len({*dataset.sampler(pool=1)}) == len({*dataset.sampler(pool=128)}) == len(dataset)
    read, of = [], type(dataset)._read
    monkeypatch.setattr(type(dataset), "_read", lambda self, part: read.append(part) or of(self, part))
    for start in range(0, len(first), 16):
        dataset[first[start : start + 16]]
    assert len(read) == len(set(read)) == 3 * 2 * 4


def test_the_parts_that_were_read_last_are_kept(run, monkeypatch):
    monkeypatch.setattr("metaloom.flows.datasets._CACHED_PARTS", 2)
    dataset = run.dataset("trials")
    read, of = [], type(dataset)._read
    monkeypatch.setattr(type(dataset), "_read", lambda self, part: read.append(part.task) or of(self, part))
    for index in (0, 1, 0, 2, 0, 1):
        dataset[index]
    assert read == [0, 1, 2, 1]


def test_what_there_is_not_is_refused(run, tmp_path, copy_tiny_run):
    with pytest.raises(UsageError, match=r"unit must be one of transitions, episodes, trials, got 'steps'"):
        run.dataset("steps")
    with pytest.raises(IndexError, match="expected 0 to 11"):
        run.dataset("trials")[12]
    for indices, first in (([-1, 3], -1), ([3, 12, -1], 12)):
        with pytest.raises(IndexError, match=f"index {first} is out of range; expected 0 to 11"):
            run.dataset("trials")[indices]
    with pytest.raises(storage.StageMissing, match="no episodes of these"):
        run.dataset("episodes", steps=5)
    for pool in (0, 129):
        with pytest.raises(
            UsageError, match=rf"pool must be between 1 and 128, the number of cached parts, got {pool}"
        ):
            run.dataset("episodes").sampler(pool=pool)
    thinned = copy_tiny_run(tmp_path / "thinned")
    with storage.open_writer(thinned) as writer:
        writer.thin([0])
    with pytest.raises(storage.StageThinned):
        metaloom.open_run(thinned).dataset("episodes")
    assert len(metaloom.open_run(thinned).dataset("trials", iterations=slice(1, None))) == 8


@pytest.mark.parametrize("indices", [[True, False], np.array([False, True]), [1.7], torch.tensor([True])])
def test_a_mask_or_a_fraction_is_no_list_of_indices(run, indices):
    with pytest.raises(IndexError, match=r"indices must be integers, got dtype (bool|float64)"):
        run.dataset("trials")[indices]

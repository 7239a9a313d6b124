import dataclasses

import numpy as np
import pytest
import torch

from metaloom.pipeline.algorithms.contract import NumericalError
from metaloom.pipeline.algorithms.maml.meta_gradient import clipped_loss
from metaloom.pipeline.algorithms.maml.rows import build_chunks, chunk_bounds, minibatch_rows, task_rows

ALL = slice(0, 3)


def test_a_mean_over_rows_is_the_mean_over_real_steps(random_steps):
    (step,) = random_steps(1)
    rows = task_rows(step, ALL)
    for b in range(3):
        real = step.samples.advantages[b][step.samples.mask[b] == 1]
        assert rows.mean(rows.advantages)[b].item() == pytest.approx(real.mean(), rel=1e-5)


def test_a_ratio_at_the_limit_is_not_clipped(random_steps):
    rows = task_rows(random_steps(1)[0], ALL)
    for clip_eps, clipped in ((1e-3, 0), (0.0, 0), (-1e-3, 1)):
        _, fraction = clipped_loss(rows.behavior, rows, clip_eps)
        assert fraction.tolist() == pytest.approx([clipped] * 3)


def test_padding_rows_are_dropped_as_far_as_the_longest_task_allows(random_steps):
    (step,) = random_steps(1)
    rows = task_rows(step, ALL)
    assert rows.weights.shape == (3, step.episodes.lengths.sum(axis=1).max())


def test_rows_keep_their_order_and_belong_together(random_steps):
    (step,) = random_steps(1)
    rows = task_rows(step, ALL)
    for b in range(3):
        real = step.samples.mask[b] == 1
        count = real.sum()
        np.testing.assert_array_equal(rows.observations[b, :count], step.episodes.observations[b, :, :-1][real])
        np.testing.assert_array_equal(rows.actions[b, :count], step.episodes.actions[b][real])
        np.testing.assert_array_equal(rows.behavior.mean[b, :count], step.episodes.behavior["mean"][b][real])


def test_a_log_std_per_step_is_selected_like_the_other_rows(random_steps):
    (step,) = random_steps(1)
    shared = task_rows(step, ALL)
    log_std = np.broadcast_to(step.episodes.behavior["log_std"][:, None, None], step.episodes.actions.shape)
    behavior = {**step.episodes.behavior, "log_std": log_std}
    per_step = task_rows(dataclasses.replace(step, episodes=dataclasses.replace(step.episodes, behavior=behavior)), ALL)
    assert per_step.behavior.log_std.shape == per_step.actions.shape
    torch.testing.assert_close(per_step.behavior_log_prob, shared.behavior_log_prob)


def test_chunks_cover_all_tasks_in_order():
    assert chunk_bounds(5, 2) == [slice(0, 2), slice(2, 4), slice(4, 5)]
    assert chunk_bounds(4, 10) == [slice(0, 4)]


def test_chunks_hold_the_rows_of_their_tasks_in_every_round(random_steps):
    steps = random_steps(2, ragged=False)
    first, second = build_chunks(steps, 2)
    assert (first.first_task, len(first), second.first_task, len(second)) == (0, 2, 2, 1)
    np.testing.assert_array_equal(second.rounds[1].advantages[0], steps[1].samples.advantages[2].ravel())


def test_minibatches_partition_the_real_rows_of_every_task():
    rng = np.random.default_rng(0)
    mask = (rng.random((4, 30)) < 0.6).astype(np.float32)
    parts = minibatch_rows(mask, 4, rng)
    for b in range(4):
        real_counts = [int(mask[b, part[b]].sum()) for part in parts]
        assert max(real_counts) - min(real_counts) <= 1
        rows = np.concatenate([part[b] for part in parts])
        assert len(set(rows)) == len(rows)
        assert set(np.flatnonzero(mask[b])) <= set(rows)


def test_minibatches_are_random_and_repeatable():
    mask = np.ones((2, 12))
    a, b, c = (minibatch_rows(mask, 3, np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))
    assert not np.array_equal(a[0], c[0])


def test_a_task_with_fewer_rows_than_minibatches_weighs_nothing_in_some(random_steps):
    (step,) = random_steps(1, E=1, T=5)
    short = step.samples.mask.reshape(3, -1).sum(axis=1).argmin()
    assert step.samples.mask[short].sum() < 5
    rows = minibatch_rows(step.samples.mask.reshape(3, -1), 5, np.random.default_rng(0))
    totals = [task_rows(step, ALL, part).weights[short].sum().item() for part in rows]
    assert sorted({round(total, 5) for total in totals}) == [0, 1]


@pytest.mark.parametrize("name", ["observations", "actions"])
def test_a_stored_number_that_is_not_finite_is_named_with_round_and_task(random_steps, name):
    step = random_steps(2)[1]
    poisoned = getattr(step.episodes, name).copy()
    poisoned[2, 0, 0, 0] = np.nan
    episodes = dataclasses.replace(step.episodes, **{name: poisoned})
    with pytest.raises(NumericalError, match=rf"rollout batch 1: {name} of task 2 holds nan"):
        task_rows(dataclasses.replace(step, episodes=episodes), slice(1, 3))

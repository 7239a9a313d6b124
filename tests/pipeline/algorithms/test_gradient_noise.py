"""Signal and noise of the meta-gradient over tasks."""

import math

import numpy as np
import pytest
import torch

from metaloom.pipeline.algorithms.contract import Setup
from metaloom.pipeline.algorithms.maml.meta_gradient import (
    SPLIT_COSINE,
    STANDARD_ERROR,
    meta_gradient,
    noise_metrics,
)
from metaloom.pipeline.algorithms.maml.rows import build_chunks
from metaloom.pipeline.algorithms.maml.settings import EMAML, MAMLPPO, MAMLTRPO, MAMLVPG, ProMP
from metaloom.pipeline.baselines import BaselineConfig
from metaloom.pipeline.config.run import build_config
from metaloom.pipeline.estimation.config import ProcessingConfig
from metaloom.pipeline.nn.spec import Spaces
from metaloom.pipeline.policies import PolicyConfig
from metaloom.pipeline.policies.build import GaussianPolicy
from metaloom.pipeline.schema import ConfigError

POLICY = GaussianPolicy(Spaces((3,), 1.0, 2, 0), PolicyConfig(hidden_sizes=(4,)))


def spread_of(gradients):
    """Mean and spread of gradients [B, n] of two parameters of one element each."""
    named = lambda vector: {"a": vector[:1], "b": vector[1:]}  # noqa: E731
    return named(gradients.mean(axis=0)), named(gradients[::2].sum(axis=0)), np.square(gradients).sum(axis=1)


def test_a_case_worked_out_by_hand():
    # Mean (2, 1). Even tasks sum to (4, 0), odd ones to (4, 4): the cosine is 16 / (4 · 4√2) = 1/√2.
    # Squared norms 1 + 5 + 9 + 13 = 28, minus 4 · 5, over 3: s² = 8/3, and of the mean of four tasks 2/3.
    found = noise_metrics(*spread_of(np.array([[1.0, 0.0], [1.0, 2.0], [3.0, 0.0], [3.0, 2.0]])))
    assert found[STANDARD_ERROR] == pytest.approx(math.sqrt(2 / 3))
    assert found[SPLIT_COSINE] == pytest.approx(1 / math.sqrt(2))


def test_equal_gradients_agree_and_have_no_error_and_opposite_ones_do_not():
    equal = noise_metrics(*spread_of(np.tile([[0.1, 0.7]], (5, 1))))
    assert equal == {STANDARD_ERROR: pytest.approx(0, abs=1e-7), SPLIT_COSINE: pytest.approx(1)}
    opposite = noise_metrics(*spread_of(np.array([[1.0, 0.0], [-1.0, 0.0]])))
    assert opposite == {STANDARD_ERROR: pytest.approx(1), SPLIT_COSINE: -1}
    assert noise_metrics(*spread_of(np.zeros((2, 2)))) == {STANDARD_ERROR: 0, SPLIT_COSINE: 0}


def test_noise_around_zero_has_a_norm_as_large_as_its_standard_error():
    rng = np.random.default_rng(0)
    found = [noise_metrics(*spread_of(rng.standard_normal((8, 2)))) for _ in range(4000)]
    # E ‖ḡ‖² = n/B = 2/8, and the squared standard error is its unbiased estimate.
    assert np.mean([m[STANDARD_ERROR] ** 2 for m in found]) == pytest.approx(2 / 8, rel=0.03)
    assert np.mean([m[SPLIT_COSINE] for m in found]) == pytest.approx(0, abs=0.05)


def build(settings):
    sizes = ((3,), 1.0, POLICY.action_size, 0, "toy", 5)
    return settings.build(Setup(*sizes, POLICY.config, BaselineConfig(), ProcessingConfig(), "cpu", np.negative))


@pytest.mark.parametrize("tasks_per_chunk", [1, 2, 3])
def test_it_is_made_of_the_gradients_of_single_tasks(random_steps, tasks_per_chunk):
    learner, steps = build(ProMP()), random_steps(B=5)
    state = learner.initialize(run_seed=0)
    problem, params = learner.problem(state, steps), {k: v.astype(np.float64) for k, v in state.params.items()}
    chunks, singles = (build_chunks(steps, size, dtype=torch.float64) for size in (tasks_per_chunk, 1))
    alone = [meta_gradient(problem, params, [chunk])[0] for chunk in singles]
    flat = np.stack([np.concatenate([value.ravel() for value in gradient.values()]) for gradient in alone])
    mean, _, metrics = meta_gradient(problem, params, chunks, noise=True)
    even, odd = flat[::2].sum(axis=0), flat[1::2].sum(axis=0)
    assert metrics["meta_gradient_norm"] == pytest.approx(np.linalg.norm(flat.mean(axis=0)))
    assert metrics[STANDARD_ERROR] == pytest.approx(np.sqrt(flat.var(axis=0, ddof=1).sum() / 5))
    assert metrics[SPLIT_COSINE] == pytest.approx(even @ odd / np.linalg.norm(even) / np.linalg.norm(odd))
    for name, value in meta_gradient(problem, params, chunks)[0].items():
        assert np.array_equal(value, mean[name])


@pytest.mark.parametrize("settings", [ProMP, MAMLTRPO, EMAML, MAMLVPG, MAMLPPO])
def test_to_measure_it_changes_no_bit_of_the_update(random_steps, settings):
    steps = random_steps()
    updates = []
    for measured in (False, True):
        learner = build(settings(gradient_noise=measured))
        updates.append(learner.update(learner.initialize(run_seed=0), steps, run_seed=0, iteration=0))
    (plain, without), (measured, found) = updates
    assert found.keys() - without.keys() == {STANDARD_ERROR, SPLIT_COSINE}
    assert {name: found[name] for name in without} == without
    assert all(np.array_equal(value, measured.params[name]) for name, value in plain.params.items())


def test_one_task_has_no_spread():
    with pytest.raises(ConfigError, match=r"algorithm\.gradient_noise is on but num_tasks is 1"):
        build_config({"env": "point-corner", "algorithm": {"name": "promp", "gradient_noise": True}, "num_tasks": 1})

"""Meta-gradients and the trust region's metric of networks and policies of the user's own, in float64."""

import dataclasses
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from metaloom.pipeline.algorithms.contract import Setup
from metaloom.pipeline.algorithms.maml.meta_gradient import meta_gradient, meta_objective
from metaloom.pipeline.algorithms.maml.rows import build_chunks
from metaloom.pipeline.algorithms.maml.settings import MAMLTRPO, ProMP
from metaloom.pipeline.algorithms.maml.trpo import (
    MetaPoint,
    bounded_kl,
    difference_product,
    gauss_newton_product,
    hessian_product,
)
from metaloom.pipeline.baselines import BaselineConfig
from metaloom.pipeline.estimation.config import ProcessingConfig
from metaloom.pipeline.nn.flat_networks import FlatParams
from metaloom.pipeline.policies import PolicyConfig

POLICIES = {
    "residual module": {"network": "own_network:Residual", "network_options": {"width": 5, "blocks": 2}},
    "residual": {"network": "residual", "hidden_sizes": (4, 4), "activation": "SiLU"},
    "bounded relu": {"hidden_sizes": (4,), "activation": "relu", "output_activation": "tanh"},
    "beta": {"name": "beta_policy:BetaPolicy", "hidden_sizes": (4,)},
}


@pytest.fixture(autouse=True)
def _examples(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "examples")


@pytest.fixture(params=POLICIES)
def config(request) -> PolicyConfig:
    return PolicyConfig(**POLICIES[request.param])


def build(settings, config):
    sizes = ((3,), 1.0, 2, 0, "toy", 5)
    return settings.build(Setup(*sizes, config, BaselineConfig(), ProcessingConfig(), "cpu", np.negative))


@pytest.fixture
def steps(random_steps, config):
    """Two rounds that the policy may have acted in."""
    return [as_if_acted(step, config) for step in random_steps(2)]


def as_if_acted(step, config):
    if config.name is None:
        return step
    rng, shape = np.random.default_rng(step.k), step.episodes.actions.shape
    behavior = {name: rng.uniform(1, 4, shape).astype(np.float32) for name in ("alpha", "beta")}
    actions = rng.uniform(-1, 1, shape).astype(np.float32)
    return dataclasses.replace(step, episodes=dataclasses.replace(step.episodes, actions=actions, behavior=behavior))


def problem_of(learner, state, steps):
    params = {name: value.astype(np.float64) for name, value in state.params.items()}
    chunks = build_chunks(steps, 2, dtype=torch.float64, recorded=learner.policy.recorded)
    return learner.problem(state, steps), params, chunks


@pytest.mark.parametrize("settings", [ProMP(inner_lr=0.3), MAMLTRPO(inner_lr=0.3)], ids=lambda s: s.name)
def test_the_meta_gradient_agrees_with_central_differences(steps, config, settings):
    learner = build(settings, config)
    problem, params, chunks = problem_of(learner, learner.initialize(run_seed=1), steps)
    gradients, *_ = meta_gradient(problem, params, chunks)
    assert list(gradients) == list(params)

    def loss(name, index, shift):
        moved = {key: value.copy() for key, value in params.items()}
        moved[name][index] += shift
        return meta_objective(problem, moved, chunks)["loss"].mean()

    rng = np.random.default_rng(0)
    for name, gradient in gradients.items():
        for _ in range(3):
            index = tuple(rng.integers(0, n) for n in gradient.shape)
            expected = (loss(name, index, 1e-6) - loss(name, index, -1e-6)) / 2e-6
            assert gradient[index] == pytest.approx(expected, rel=1e-5, abs=1e-8), (name, index)


def test_the_metric_is_the_hessian_of_the_kl_where_the_policies_acted(steps, config):
    learner = build(MAMLTRPO(inner_lr=0.1), config)
    problem, params, chunks = problem_of(learner, learner.initialize(run_seed=1), steps)
    acted = []

    def recorded(current, chunk):
        last = dataclasses.replace(
            chunk.rounds[-1], behavior=type(current[-1])(*(v.clone() for v in current[-1].detach()))
        )
        acted.append(dataclasses.replace(chunk, rounds=[chunk.rounds[0], last]))
        return {"loss": chunk.rounds[-1].weights.sum(-1)}

    meta_objective(dataclasses.replace(problem, objective=recorded), params, chunks)
    flat = FlatParams(params)
    products = [
        gauss_newton_product(MetaPoint(problem, params, flat, acted)),
        hessian_product(MetaPoint(problem, params, flat, acted), bounded_kl),
        difference_product(MetaPoint(problem, params, flat, acted), partial(bounded_kl, new_old=True), scaled=True),
    ]
    v = np.random.default_rng(0).standard_normal(flat.pack(params).size)
    newton, hessian, numerical = (product(v) for product in products)
    assert np.linalg.norm(newton - hessian) < 1e-7 * np.linalg.norm(hessian)
    assert np.linalg.norm(newton - numerical) < 1e-5 * np.linalg.norm(numerical)


@pytest.mark.parametrize("settings", [ProMP(), MAMLTRPO(max_kl=50.0, line_search_trials=60)], ids=lambda s: s.name)
def test_an_iteration_adapts_and_updates(steps, config, settings):
    learner = build(settings, config)
    state = learner.initialize(run_seed=1)
    adapted = learner.adapt(state, learner.acting_params(state, 3), steps[0])
    updated, metrics = learner.update(state, steps, run_seed=0, iteration=0)
    assert learner.kernel.name == "torch"
    assert metrics["loss_after"] < metrics["loss_before"]
    assert all((adapted.params[name] != value).any() for name, value in state.params.items())
    assert {k: (v.shape, v.dtype) for k, v in updated.params.items()} == {
        k: (v.shape, v.dtype) for k, v in state.params.items()
    }

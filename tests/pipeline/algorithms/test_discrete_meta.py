"""The meta family on discrete actions: gradients and metrics of a categorical policy in float64, updates."""

import dataclasses
from functools import partial

import numpy as np
import pytest
import torch

from metaloom.pipeline.algorithms.contract import Kernel, Setup
from metaloom.pipeline.algorithms.maml.meta_gradient import meta_gradient, meta_objective
from metaloom.pipeline.algorithms.maml.policy_gradient import log_likelihood_per_cell
from metaloom.pipeline.algorithms.maml.rows import build_chunks, task_rows
from metaloom.pipeline.algorithms.maml.settings import (
    EMAML,
    MAMLPPO,
    MAMLTRPO,
    MAMLVPG,
    DiceMAML,
    ProMP,
    TrustRegion,
    VPGDice,
)
from metaloom.pipeline.algorithms.maml.trpo import (
    MetaPoint,
    bounded_kl,
    difference_product,
    gauss_newton_product,
    hessian_product,
)
from metaloom.pipeline.baselines import BaselineConfig
from metaloom.pipeline.estimation.config import ProcessingConfig
from metaloom.pipeline.kernels.gauss_newton import fused_gauss_newton_product
from metaloom.pipeline.nn.flat_networks import FlatParams
from metaloom.pipeline.policies import PolicyConfig

B, E, T, O, N = 3, 2, 5, 3, 4

WITH_A_VALUE = [
    ProMP(inner_lr=0.3, init_inner_kl_penalty=0.5),
    ProMP(inner_lr=0.3, inner_steps=2, trainable_inner_lr=True),
    MAMLTRPO(inner_lr=0.3),
    MAMLTRPO(inner_lr=0.3, inner_loss="likelihood_ratio", inner_steps=2),
    EMAML(inner_lr=0.3),
    MAMLVPG(inner_lr=0.3),
    MAMLPPO(inner_lr=0.3),
    MAMLPPO(inner_lr=0.3, inner_loss="clipped"),
]
"""Their losses are functions of the parameters; the value of DiCE's is not."""


def told(settings):
    return "-".join(map(str, (settings.name, settings.inner_steps, getattr(settings, "inner_loss", ""))))


DICE = [DiceMAML(inner_lr=0.3), VPGDice(inner_lr=0.3)]


def build(settings, **policy):
    sizes = ((O,), 1.0, 0, N, "toy", T)
    config = PolicyConfig(**{"hidden_sizes": (4, 5), **policy})
    return settings.build(Setup(*sizes, config, BaselineConfig(), ProcessingConfig(), "cpu", np.negative))


@pytest.fixture
def steps(random_steps):
    """Rounds of discrete actions, with the probabilities of a policy of another kind as what acted."""

    def made(settings):
        rounds = random_steps(settings.inner_steps + 1, B=B, E=E, T=T, O=O)
        return [discrete(step, settings) for step in rounds]

    return made


def discrete(step, settings):
    rng = np.random.default_rng(step.k)
    mask = step.samples.mask
    logits = torch.from_numpy(rng.standard_normal((B, E, T, N)).astype(np.float32))
    episodes = dataclasses.replace(
        step.episodes,
        actions=rng.integers(0, N, (B, E, T)) * (mask == 1),
        behavior={"log_probs": torch.log_softmax(logits, -1).numpy() * mask[..., None]},
    )
    samples = step.samples
    if "adjusted_rewards" in settings.learns_from:
        samples = dataclasses.replace(samples, adjusted_rewards=rng.standard_normal(mask.shape, np.float32) * mask)
    return dataclasses.replace(step, episodes=episodes, samples=samples)


def problem_of(learner, state, steps, dtype=torch.float64):
    extra = {name: value for name, value in state.extra.items() if name.startswith("log_inner_lr.")}
    params = {name: value.astype(np.float64) for name, value in (state.params | extra).items()}
    chunks = build_chunks(steps, 2, dtype=dtype, recorded=learner.policy.recorded)
    return learner.problem(state, steps), params, chunks


def numerical(loss, params, name, index):
    def at(shift):
        moved = {key: value.copy() for key, value in params.items()}
        moved[name][index] += shift
        return loss(moved)

    return (at(1e-6) - at(-1e-6)) / 2e-6


def places(gradients):
    rng = np.random.default_rng(0)
    return [(name, tuple(rng.integers(0, n) for n in g.shape)) for name, g in gradients.items() for _ in range(3)]


@pytest.mark.parametrize("settings", WITH_A_VALUE, ids=told)
def test_the_meta_gradient_agrees_with_central_differences(steps, settings):
    learner, rounds = build(settings), steps(settings)
    problem, params, chunks = problem_of(learner, learner.initialize(run_seed=1), rounds)
    gradients, *_ = meta_gradient(problem, params, chunks)
    assert list(gradients) == list(params)

    def loss(moved):
        return meta_objective(problem, moved, chunks)["loss"].mean()

    for name, index in places(gradients):
        expected = numerical(loss, params, name, index)
        assert gradients[name][index] == pytest.approx(expected, rel=1e-5, abs=1e-8), (name, index)


@pytest.mark.parametrize("settings", DICE, ids=lambda s: s.name)
def test_the_meta_gradient_of_dice_agrees_with_central_differences_around_fixed_pasts(steps, settings):
    """Where the ⊥τ of the magic box stay what they are at θ, its value is a function whose derivatives are DiCE's."""
    learner, rounds = build(settings), steps(settings)
    state = learner.initialize(run_seed=1)
    problem, params, chunks = problem_of(learner, state, rounds)
    gradients, *_ = meta_gradient(problem, params, chunks)
    pasts = {}

    def past_of(current, rows):
        return rows.episodes.split(current.log_prob(rows.actions)).cumsum(-1)

    def remember(current, chunk):
        for k, rows in enumerate(chunk.rounds):
            pasts[id(rows)] = past_of(current[k], rows).detach()
        return {"loss": chunk.rounds[0].weights.sum(-1)}

    meta_objective(dataclasses.replace(problem, objective=remember), params, chunks)

    def fixed(current, rows):
        box = (past_of(current, rows) - pasts[id(rows)]).exp()
        return -rows.episodes.mean_over_cells(box * rows.episodes.adjusted_rewards)

    last = fixed if settings.name == "dice-maml" else log_likelihood_per_cell
    around = dataclasses.replace(
        problem, inner_loss=fixed, objective=lambda current, chunk: {"loss": last(current[-1], chunk.rounds[-1])}
    )

    def loss(moved):
        return meta_objective(around, moved, chunks)["loss"].mean()

    for name, index in places(gradients):
        expected = numerical(loss, params, name, index)
        assert gradients[name][index] == pytest.approx(expected, rel=1e-5, abs=1e-8), (name, index)


@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize(
    "settings", [{}, {"inner_steps": 2, "inner_loss": "likelihood_ratio"}, {"inner_steps": 0}, {"first_order": True}]
)
def test_fused_products_are_those_of_the_definition(steps, settings, activation):
    algorithm = MAMLTRPO(inner_lr=0.3, **settings)
    learner = build(algorithm, activation=activation)
    assert learner.kernel == Kernel("fused", f"plain {activation} network on the CPU")
    problem, params, chunks = problem_of(learner, learner.initialize(run_seed=1), steps(algorithm))
    flat = FlatParams(params)
    at = MetaPoint(problem, params, flat, chunks)
    products = [of(at) for of in (fused_gauss_newton_product, gauss_newton_product)]
    for seed in range(3):
        v = np.random.default_rng(seed).standard_normal(flat.pack(params).size)
        fused, by_torch = (product(v) for product in products)
        assert np.linalg.norm(by_torch) > 1e-3
        assert np.linalg.norm(fused - by_torch) < 1e-10 * np.linalg.norm(by_torch)


def test_the_metric_is_the_hessian_of_the_kl_where_the_policies_acted(steps):
    algorithm = MAMLTRPO(inner_lr=0.2)
    learner = build(algorithm)
    problem, params, chunks = problem_of(learner, learner.initialize(run_seed=1), steps(algorithm))
    acted = []

    def recorded(current, chunk):
        last = dataclasses.replace(chunk.rounds[-1], behavior=current[-1].detach())
        acted.append(dataclasses.replace(chunk, rounds=[chunk.rounds[0], last]))
        return {"loss": chunk.rounds[-1].weights.sum(-1)}

    meta_objective(dataclasses.replace(problem, objective=recorded), params, chunks)
    at = MetaPoint(problem, params, FlatParams(params), acted)
    v = np.random.default_rng(0).standard_normal(at.flat.pack(params).size)
    newton, fused = gauss_newton_product(at)(v), fused_gauss_newton_product(at)(v)
    hessian = hessian_product(at, bounded_kl)(v)
    differences = difference_product(at, partial(bounded_kl, new_old=True), scaled=True)(v)
    for found in (newton, fused):
        assert np.linalg.norm(found - hessian) < 1e-7 * np.linalg.norm(hessian)
        assert np.linalg.norm(found - differences) < 1e-5 * np.linalg.norm(hessian)


@pytest.mark.parametrize("settings", [*WITH_A_VALUE, *DICE], ids=told)
def test_an_iteration_adapts_and_updates_every_parameter(steps, settings):
    if isinstance(settings, TrustRegion):  # others acted, far away
        settings = settings.model_copy(update={"max_kl": 50.0, "line_search_trials": 60})
    learner, rounds = build(settings), steps(settings)
    state = learner.initialize(run_seed=1)
    adapted = learner.adapt(state, learner.acting_params(state, B), rounds[0])
    updated, metrics = learner.update(state, rounds, run_seed=0, iteration=0)
    assert list(state.params) == [f"logits_network.{name}" for name in
                                  ("hidden_0.kernel", "hidden_0.bias", "hidden_1.kernel", "hidden_1.bias",
                                   "output.kernel", "output.bias")]  # fmt: skip
    assert all((adapted.params[name] != value).any() for name, value in state.params.items())
    assert {k: (v.shape, v.dtype) for k, v in updated.params.items()} == {
        k: (v.shape, v.dtype) for k, v in state.params.items()
    }
    assert all((updated.params[name] != value).any() for name, value in state.params.items())
    assert np.isfinite([*metrics.values()]).all()


def test_adaptation_is_the_reinforce_step_of_a_softmax(steps):
    """Of the last bias: α mean(A (1_a - p)), by hand."""
    settings = MAMLVPG(inner_lr=0.5)
    learner = build(settings, hidden_sizes=(4,))
    (step, _) = steps(settings)
    state = learner.initialize(run_seed=1)
    adapted = learner.adapt(state, learner.acting_params(state, B), step)
    kernel, bias = state.params["logits_network.output.kernel"], state.params["logits_network.output.bias"]
    hidden = (state.params[f"logits_network.hidden_0.{name}"] for name in ("kernel", "bias"))
    hidden_kernel, hidden_bias = hidden
    seen = np.tanh(step.episodes.observations[:, :, :T].astype(np.float64) @ hidden_kernel + hidden_bias)
    logits = seen @ kernel + bias
    probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    pull = (np.eye(N)[step.episodes.actions] - probs) * step.samples.advantages[..., None]
    mask = step.samples.mask
    expected = bias + 0.5 * (pull * mask[..., None]).sum((1, 2)) / mask.sum((1, 2))[:, None]
    np.testing.assert_allclose(adapted.params["logits_network.output.bias"], expected, rtol=1e-5, atol=1e-6)


def test_ratios_and_kls_of_discrete_rows_are_those_of_their_probabilities(steps):
    (step, _) = steps(ProMP())
    learner = build(ProMP())
    rows = task_rows(step, slice(0, B), dtype=torch.float64, recorded=learner.policy.recorded)
    assert rows.actions.dtype == torch.int64
    chosen = np.take_along_axis(step.episodes.behavior["log_probs"], step.episodes.actions[..., None], -1)[..., 0]
    for b in range(B):
        real = rows.weights[b] > 0
        expected = chosen[b][step.samples.mask[b] == 1]
        np.testing.assert_allclose(rows.behavior_log_prob[b][real], expected, rtol=1e-6)
    torch.testing.assert_close(rows.mean(rows.behavior.kl(rows.behavior)), torch.zeros(B, dtype=torch.float64))

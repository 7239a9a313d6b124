from itertools import pairwise

import numpy as np
import pytest
import torch

from metaloom.pipeline.policies.actors.off_policy import TanhGaussianActor
from metaloom.pipeline.types import TaskParams

B, E, O, A, Z = 3, 4, 5, 2, 3


def belief(mean: list[float], variance: list[float], num_tasks: int = B) -> dict[str, np.ndarray]:
    values = {"belief.mean": mean, "belief.variance": variance}
    return {name: np.tile(np.float32(value), (num_tasks, 1)) for name, value in values.items()}


def act(actor, observations: np.ndarray) -> np.ndarray:
    """[T, N, A]: the same observations at every step."""
    T, N, _ = actor.actions.shape
    return np.array([actor.act(t, observations, np.arange(N)).copy() for t in range(T)])


@pytest.mark.parametrize("with_belief", [False, True])
def test_mean_and_log_std_are_those_of_the_relu_network(setup, with_belief, random_network, relu_network):
    params = random_network("policy_network", B, O + Z * with_belief, 2 * A)
    actor = TanhGaussianActor(setup(params | (belief([1, 2, 3], [1, 1, 4]) if with_belief else {}), B=B, E=E, A=A))
    observations = np.random.default_rng(1).normal(size=(B * E, O)).astype(np.float32)
    act(actor, observations)
    inputs = observations.reshape(B, E, O)
    if with_belief:
        inputs = np.concatenate([inputs, actor.behavior_by_task["latent"]], axis=2)
    for b in range(B):
        outputs = relu_network("policy_network", params, b)(torch.tensor(inputs[b]).double()).detach().numpy()
        rows = slice(b * E, (b + 1) * E)
        np.testing.assert_allclose(actor.behavior_by_step["mean"][0, rows], outputs[:, :A], atol=1e-5)
        log_stds = np.clip(outputs[:, A:], -20, 2)
        np.testing.assert_allclose(actor.behavior_by_step["log_stds"][0, rows], log_stds, atol=1e-5)


def test_actions_are_the_tanh_of_a_gaussian_with_these_moments(setup, constant_network):
    params = constant_network("policy_network", B, O, [0.3, -0.5, np.log(0.2), np.log(0.6)])
    actions = act(TanhGaussianActor(setup(params, B=B, E=20, T=200, A=A)), np.zeros((B * 20, O), np.float32))
    assert np.abs(actions).max() < 1
    n = actions.size / A
    gaussian = np.arctanh(actions.astype(np.float64)).reshape(-1, A)
    np.testing.assert_allclose(gaussian.mean(0), [0.3, -0.5], atol=4 * 0.6 / np.sqrt(n))
    np.testing.assert_allclose(gaussian.std(0), [0.2, 0.6], rtol=4 / np.sqrt(2 * n))
    correlation = np.corrcoef(gaussian.T)[0, 1]
    assert abs(correlation) < 4 / np.sqrt(n)


def test_without_a_draw_the_action_is_the_tanh_of_the_mean(setup, random_network):
    params = random_network("policy_network", B, O, 2 * A)
    observations = np.random.default_rng(1).normal(size=(B * E, O)).astype(np.float32)
    actor = TanhGaussianActor(setup(params, B=B, E=E, T=2, A=A, draw=False))
    actions = act(actor, observations)
    np.testing.assert_array_equal(actions, np.tanh(actor.behavior_by_step["mean"]))
    drawn = act(TanhGaussianActor(setup(params, B=B, E=E, T=2, A=A)), observations)
    assert (actions != drawn).mean() > 0.9


def test_log_std_is_clamped_at_both_ends(setup, constant_network):
    params = constant_network("policy_network", 1, O, [0, 0, 50, -50])
    actor = TanhGaussianActor(setup(params, B=1, E=1, A=2))
    actions = act(actor, np.zeros((1, O), np.float32))
    assert actor.behavior_by_step["log_stds"][0, 0].tolist() == [2, -20]
    assert actions[0, 0, 0] != 0
    assert abs(actions[0, 0, 1]) < 1e-7


def test_latents_are_drawn_from_the_belief_anew_for_every_episode_and_task(setup, constant_network):
    params = constant_network("policy_network", B, O + Z, [0, 0, 0, 0])
    mean, variance = [1.0, -2.0, 0.0], [0.25, 4.0, 1.0]
    actor = TanhGaussianActor(setup(params | belief(mean, variance), B=B, E=2000, A=A))
    latent = actor.behavior_by_task["latent"]
    assert (latent.shape, latent.dtype) == ((B, 2000, Z), np.float32)
    n = B * 2000
    draws = latent.reshape(n, Z).astype(np.float64)
    assert len(np.unique(draws[:, 0])) > 0.99 * n
    np.testing.assert_allclose(draws.mean(0), mean, atol=4 * 2 / np.sqrt(n))
    np.testing.assert_allclose(draws.var(0), variance, rtol=4 * np.sqrt(2 / n))


def test_every_task_draws_its_latents_from_its_own_belief(setup, constant_network):
    params = constant_network("policy_network", 2, O + 1, [0, 0, 0, 0])
    params |= {"belief.mean": np.float32([[5], [-5]]), "belief.variance": np.float32([[0], [0]])}
    latent = TanhGaussianActor(setup(params, B=2, E=3, A=A)).behavior_by_task["latent"]
    assert latent[..., 0].tolist() == [[5, 5, 5], [-5, -5, -5]]


def test_latents_are_the_same_with_and_without_a_draw_of_actions(setup, random_network):
    params = random_network("policy_network", B, O + Z, 2 * A) | belief([0, 0, 0], [1, 1, 1])
    latents = [
        TanhGaussianActor(setup(params, B=B, E=E, A=A, draw=d)).behavior_by_task["latent"] for d in (True, False)
    ]
    np.testing.assert_array_equal(*latents)


def test_rows_that_ended_change_nothing_for_the_others_and_leave_no_trace(setup, random_network):
    params = random_network("policy_network", B, O + Z, 2 * A) | belief([0, 0, 0], [1, 1, 1])
    observations = np.random.default_rng(1).normal(size=(B * E, O)).astype(np.float32)
    whole, part = (TanhGaussianActor(setup(params, B=B, E=E, A=A)) for _ in range(2))
    rows = np.array([0, 5, 6, 11])
    expected, found = whole.act(0, observations, np.arange(B * E)), part.act(0, observations, rows)
    assert found.tobytes() == expected[rows].tobytes()
    assert part.actions[0, rows].tobytes() == found.tobytes()
    others = np.setdiff1d(np.arange(B * E), rows)
    for recorded in (part.actions, *part.behavior_by_step.values()):
        assert recorded[0, rows].all()
        assert not recorded[0, others].any()


def test_the_bits_of_a_task_depend_on_neither_the_others_nor_how_parameters_are_stored(setup, random_network):
    params = random_network("policy_network", 1, O + Z, 2 * A) | belief([0, 0, 0], [1, 1, 1], 1)
    shared = TaskParams.broadcast({name: value[0] for name, value in params.items()}, 6)
    copied = TaskParams({name: value.copy() for name, value in shared.params.items()})
    observations = np.random.default_rng(1).normal(size=(6 * E, O)).astype(np.float32)

    def outputs(params: TaskParams, first: int, stop: int) -> list[np.ndarray]:
        actor = TanhGaussianActor(setup(params.slice(first, stop).params, B=stop - first, E=E, A=A, first_task=first))
        actions = actor.act(0, observations[first * E : stop * E], np.arange((stop - first) * E))
        return [actions, *(values[0] for values in actor.behavior_by_step.values())]

    together = outputs(shared, 0, 6)
    for stored, split in ((copied, [0, 6]), (shared, [0, 2, 6]), (copied, [0, 1, 2, 3, 4, 5, 6])):
        parts = [outputs(stored, a, b) for a, b in pairwise(split)]
        for whole, pieces in zip(together, zip(*parts, strict=True), strict=True):
            assert np.concatenate(pieces).tobytes() == whole.tobytes()

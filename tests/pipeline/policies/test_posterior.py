"""Acting on a posterior: the same beliefs in torch, from what is stored, and for every task by itself."""

import numpy as np
import pytest
import torch
from small_setups import small_setup

from metaloom.pipeline.algorithms.varibad.learner import VariBADPolicy
from metaloom.pipeline.algorithms.varibad.settings import VariBAD
from metaloom.pipeline.nn.spec import Spaces
from metaloom.pipeline.policies.acting import check_actor_params
from metaloom.pipeline.policies.actors import ActorSetup
from metaloom.pipeline.policies.actors.on_policy import PosteriorActor
from metaloom.pipeline.policies.config import PolicyConfig
from metaloom.pipeline.policies.posterior import PosteriorNetwork
from metaloom.pipeline.policies.remembering import Remembering, recollect
from metaloom.pipeline.schema import ConfigError
from metaloom.pipeline.seeding import generator
from metaloom.pipeline.types import TaskParams

O, B, E, T, Z = 3, 2, 3, 4, 2
CONTINUOUS, DISCRETE = Spaces((O,), 1.0, 2, 0), Spaces((O,), 1.0, 0, 5)
SETTINGS = VariBAD(embedding_size=6, encoder_size=7, latent_size=Z)
of_both = pytest.mark.parametrize("spaces", [CONTINUOUS, DISCRETE], ids=["gaussian", "categorical"])
of_networks = pytest.mark.parametrize("network", ["mlp", "residual"])


def moved(params, rng):
    """Parameters as they are once they have learned: those that begin with zero are not zero any more."""
    return {
        name: value if value.any() else rng.normal(scale=0.3, size=value.shape).astype(value.dtype)
        for name, value in params.items()
    }


def made(spaces, network="mlp", num_tasks=B):
    """A policy's settings, itself in torch, and its parameters for every task."""
    config = PolicyConfig(network=network, hidden_sizes=(6, 6))
    policy, rng = VariBADPolicy(SETTINGS, small_setup(config, **vars(spaces))), np.random.default_rng(0)
    params = moved(policy.encoder.initialize(rng) | policy.policy.initialize(rng), rng)
    return config, policy, params, TaskParams.broadcast(params, num_tasks)


def actor_of(config, spaces, params, *, tasks=range(B), memory=None, episode=0):
    taken = np.zeros((T, len(tasks) * E, spaces.action_size or 1), np.float32)
    rngs = [generator(0, "actions", b, episode) for b in tasks]
    return PosteriorActor(
        ActorSetup(config, params, taken, num_rows=E, spaces=spaces, rngs=rngs, belief_rng=generator, memory=memory)
    )


def episode_of(actor, observations):
    """Act through an episode of T steps, whose rewards follow from the observations."""
    rows = np.arange(observations.shape[1])
    for t in range(T):
        actor.act(t, observations[t], rows)
        actor.learn_of(rows, observations[t, :, 0], np.full(len(rows), t == T - 1))
    return {name: value.copy() for name, value in actor.behavior_by_step.items()}


def observed(seed=1, tasks=B):
    return np.random.default_rng(seed).normal(size=(T, tasks * E, O)).astype(np.float32)


def stored(values):
    """[B, E, T, ...] of [T, B * E, ...]."""
    return np.moveaxis(values.reshape(T, B, E, *values.shape[2:]), 0, 2)


@of_networks
@of_both
def test_beliefs_and_actions_are_what_torch_computes_of_the_whole_sequence(spaces, network):
    config, policy, params, of_tasks = made(spaces, network)
    actor, seen = actor_of(config, spaces, of_tasks), observed()
    behavior = episode_of(actor, seen)
    before = np.zeros((T, B * E, (spaces.num_actions or spaces.action_size) + 2), np.float32)
    actions = np.eye(5)[actor.actions] if spaces.num_actions else actor.actions
    before[1:] = np.concatenate([actions, seen[..., :1], np.zeros((T, B * E, 1))], -1)[:-1]
    tensors = {name: torch.tensor(value) for name, value in params.items()}
    posteriors = policy.encoder.posteriors(tensors, torch.tensor(np.concatenate([seen, before], -1)))
    for name, value in zip(("posterior_mean", "posterior_log_std"), posteriors, strict=True):
        np.testing.assert_allclose(behavior[name], value.numpy(), atol=2e-6)
    rows = torch.cat([torch.tensor(seen), *posteriors], -1).flatten(0, 1)
    now = policy.policy.distribution(tensors, rows)
    name, value = ("log_probs", now.log_probs) if spaces.num_actions else ("mean", now.mean)
    np.testing.assert_allclose(behavior[name], value.numpy().reshape(behavior[name].shape), atol=5e-6)
    recorded = policy.recorded({k: torch.tensor(v) for k, v in behavior.items()} | by_task(actor))
    assert torch.equal(recorded[0], torch.tensor(behavior[name]))


def by_task(actor):
    return {name: torch.tensor(value) for name, value in actor.behavior_by_task.items()}


@of_networks
@of_both
def test_beliefs_come_again_bit_for_bit_from_what_is_stored(spaces, network):
    config, _, _, params = made(spaces, network)
    first = actor_of(config, spaces, params)
    begun = episode_of(first, observed())
    second = actor_of(config, spaces, params, memory=first.memory, episode=1)
    behavior = episode_of(second, observed(2))
    assert not np.array_equal(begun["posterior_mean"][0], behavior["posterior_mean"][0])

    remembering = Remembering(config, spaces, params, E, network=PosteriorNetwork)
    for actor, seen in ((first, observed()), (second, observed(2))):
        parts = (stored(seen), stored(actor.actions), stored(seen[..., 0]), np.full((B, E), T))
        outputs = recollect(remembering, *parts)
    for name in ("state", "last"):
        assert np.array_equal(getattr(remembering.memory, name), getattr(second.memory, name))
    means, log_stds = (stored(behavior[name])[:, :, -1] for name in ("posterior_mean", "posterior_log_std"))
    assert np.array_equal(remembering.network.posterior, np.concatenate([means, log_stds], -1))
    if not spaces.num_actions:
        assert np.array_equal(outputs, stored(behavior["mean"]))


@of_both
def test_a_tasks_beliefs_depend_on_no_other_task(spaces):
    config, _, _, params = made(spaces, num_tasks=3)
    seen = observed(tasks=3)
    behavior = episode_of(actor_of(config, spaces, params, tasks=range(3)), seen)
    for b in range(3):
        rows = slice(b * E, (b + 1) * E)
        found = episode_of(actor_of(config, spaces, params.slice(b, b + 1), tasks=[b]), seen[:, rows])
        assert {*found} >= {"posterior_mean", "posterior_log_std"}
        assert all(np.array_equal(found[name], behavior[name][:, rows]) for name in found)


def test_a_trial_begins_with_the_same_belief_whatever_came_before():
    config, _, _, params = made(CONTINUOUS)
    actor = actor_of(config, CONTINUOUS, params)
    begun = episode_of(actor, observed())
    again = episode_of(actor_of(config, CONTINUOUS, params), observed())
    going_on = episode_of(actor_of(config, CONTINUOUS, params, memory=actor.memory), observed())
    assert np.array_equal(again["posterior_mean"], begun["posterior_mean"])
    assert not np.array_equal(going_on["posterior_mean"][0], begun["posterior_mean"][0])


def test_parameters_that_do_not_fit_are_refused():
    config, _, _, of_tasks = made(CONTINUOUS)
    check_actor_params("posterior", config, of_tasks.params, CONTINUOUS)
    for name, value, found in (
        ("encoder.embedding.kernel", np.zeros((B, 4, 6), np.float32), r"got \(2, 4, 6\); expected \[B, 7, 6\]"),
        ("cell.hidden_kernel", np.zeros((B, 7, 20), np.float32), r"got \(2, 7, 20\); expected \[B, 7, 21\]"),
        ("mean_network.hidden_0.kernel", np.zeros((B, 3, 6), np.float32), r"got \(2, 3, 6\); expected \[B, 7, 6\]"),
        ("log_std", np.zeros((B, 3), np.float32), r"got \(2, 3\); expected \[B, 2\]"),
        ("trial.state", np.zeros((B, 7), np.float32), "trial.last: got nothing"),
    ):
        with pytest.raises(ValueError, match=found):
            check_actor_params("posterior", config, {**of_tasks.params, name: value}, CONTINUOUS)
    without = {name: value for name, value in of_tasks.params.items() if name != "encoder.posterior.bias"}
    with pytest.raises(ValueError, match=r"policy parameter encoder\.posterior\.kernel"):
        check_actor_params("posterior", config, without, CONTINUOUS)


def test_images_are_refused():
    with pytest.raises(ConfigError, match=r"observations are images of shape \(8, 8, 3\)"):
        VariBADPolicy(SETTINGS, small_setup(PolicyConfig(), **vars(Spaces((8, 8, 3), 255.0, 0, 4))))

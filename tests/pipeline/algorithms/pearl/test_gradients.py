"""All gradients of a gradient step against autograd in float64, and where none may flow."""

import numpy as np
import pytest
import torch

from metaloom.pipeline.algorithms.pearl.learner import posterior
from metaloom.pipeline.types import LearnerState, Minibatch, Transitions

from .conftest import DISCOUNT, A, K, N, Z, build, small

PREFIX = {"policy": "policy_network", "encoder": "encoder"}
VARIANTS = {
    "defaults": {},
    "point": {"use_information_bottleneck": False},
    "next observations": {"use_next_obs_in_context": True},
    "regularized": {"policy_mean_reg": 0.3, "policy_std_reg": 0.2, "policy_pre_activation_reg": 0.1},
}


def leaves(learner: LearnerState, name: str) -> dict[str, torch.Tensor]:
    prefix = PREFIX.get(name, name)
    arrays = learner.params | learner.extra
    return {
        key.removeprefix(f"{prefix}."): torch.tensor(value, requires_grad=True)
        for key, value in arrays.items()
        if key.startswith(f"{prefix}.")
    }


def mlp(params: dict[str, torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
    x = torch.cat(inputs, -1)
    num_hidden = len(params) // 2 - 1
    for i in range(num_hidden):
        x = (x @ params[f"hidden_{i}.kernel"] + params[f"hidden_{i}.bias"]).relu()
    return x @ params["output.kernel"] + params["output.bias"]


def tensors(transitions: Transitions) -> tuple[torch.Tensor, ...]:
    t = transitions
    arrays = (t.observations, t.actions, t.rewards[..., None], t.next_observations, t.terminated[..., None])
    return tuple(torch.tensor(array, dtype=torch.float64) for array in arrays)


def reference(settings, learner, learned_qs, minibatch: Minibatch, latent_noise, action_noise):
    """Gradients by network, written from ALGORITHMS' list of losses and from nothing else."""
    nets = {name: leaves(learner, name) for name in ("policy", "encoder", "q1", "q2", "v", "target_v")}
    obs, actions, rewards, next_obs, terminated = tensors(minibatch.transitions)
    c_obs, c_actions, c_rewards, c_next, _ = tensors(minibatch.context)

    context = [c_obs, c_actions, c_rewards] + ([c_next] if settings.use_next_obs_in_context else [])
    outputs = mlp(nets["encoder"], *context)
    if settings.use_information_bottleneck:
        means, raw = outputs.chunk(2, -1)
        precision = 1 / torch.nn.functional.softplus(raw, threshold=50).clamp(min=1e-7)
        belief = torch.distributions.Normal((means * precision).sum(1) / precision.sum(1), precision.sum(1) ** -0.5)
        z = belief.mean + belief.stddev * torch.tensor(latent_noise, dtype=torch.float64)
        kl = torch.distributions.kl_divergence(belief, torch.distributions.Normal(0.0, 1.0)).sum()
    else:
        z, kl = outputs.mean(1), torch.zeros(())
    z = z[:, None].expand(K, N, Z)

    with torch.no_grad():
        target = settings.reward_scale * rewards + (1 - terminated) * DISCOUNT * mlp(nets["target_v"], next_obs, z)
    q_loss = sum((mlp(nets[name], obs, actions, z) - target).square().mean() for name in ("q1", "q2"))
    (q_loss + settings.kl_weight * kl).backward()

    z = z.detach()
    mean, raw = mlp(nets["policy"], obs, z).chunk(2, -1)
    log_std = raw.clamp(-20, 2)
    u = mean + log_std.exp() * torch.tensor(action_noise, dtype=torch.float64)
    log_slope = 2 * (np.log(2) - u - torch.nn.functional.softplus(-2 * u))
    log_prob = (torch.distributions.Normal(mean, log_std.exp()).log_prob(u) - log_slope).sum(-1, keepdim=True)
    lowest = torch.minimum(*(mlp(q, obs, u.tanh(), z) for q in learned_qs))
    v_loss = (mlp(nets["v"], obs, z) - (lowest - log_prob).detach()).square().mean()
    v_loss.backward()
    policy_loss = (log_prob - lowest).mean()
    policy_loss = policy_loss + settings.policy_mean_reg * mean.square().mean()
    policy_loss = policy_loss + settings.policy_std_reg * log_std.square().mean()
    policy_loss = policy_loss + settings.policy_pre_activation_reg * u.square().sum(-1).mean()
    policy_loss.backward()
    gradients = {
        name: torch.cat([leaf.grad.flatten() for leaf in nets[name].values()]).numpy()
        for name in ("encoder", "q1", "q2", "v", "policy")
    }
    return gradients, {"q_loss": q_loss, "kl": kl / K, "value_loss": v_loss, "policy_loss": policy_loss}


def step(settings, learner, minibatch, seed=3):
    """Gradients by network, the state after one gradient step, and its metrics."""
    algorithm = build(settings)
    steps = algorithm.gradient_steps(learner)
    metrics = steps.step(minibatch, algorithm.noise(minibatch, np.random.default_rng(seed)))
    trained = (name for name, stored in steps.layout.items() if stored.optimizer)
    found = {name: np.asarray(steps.copies[name].gradient).copy() for name in trained}
    return found, steps.state(), metrics


@pytest.mark.parametrize("kernel", ["torch", "fused"])
@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_every_gradient_is_that_of_autograd(draw, options, kernel):
    settings = small(q_learning_rate=0.1, kl_weight=0.4, kernel=kernel, **options)
    learner, minibatch = draw.learner(settings, np.float64), draw.minibatch()
    found, after, metrics = step(settings, learner, minibatch)

    # V and policy learn from the Q functions after their step, which a large step size tells from those before it.
    learned_qs = [leaves(after, name) for name in ("q1", "q2")]
    rng = np.random.default_rng(3)
    noise = rng.standard_normal((K, Z), np.float32), rng.standard_normal((K, N, A), np.float32)
    expected, losses = reference(settings, learner, learned_qs, minibatch, *noise)
    for name, gradient in expected.items():
        assert np.abs(gradient).max() > 1e-3, name
        np.testing.assert_allclose(found[name], gradient, rtol=1e-5, atol=1e-6 * np.abs(gradient).max(), err_msg=name)
    for name, loss in losses.items():
        assert float(metrics[name]) == pytest.approx(float(loss.detach()), rel=1e-5), name


def changed(learner: LearnerState, *prefixes: str, factor: float = 1.5) -> LearnerState:
    def scaled(arrays):
        return {n: v * factor if n.startswith(tuple(f"{p}." for p in prefixes)) else v for n, v in arrays.items()}

    return LearnerState(scaled(learner.params), learner.optimizer, scaled(learner.extra))


def test_the_encoder_learns_nothing_from_policy_and_v_but_from_both_q_functions(draw):
    settings = small()
    learner, minibatch = draw.learner(settings), draw.minibatch()

    def encoder_gradient(of):
        return step(settings, of, minibatch)[0]["encoder"]

    before = encoder_gradient(learner)
    np.testing.assert_array_equal(encoder_gradient(changed(learner, "policy_network", "v")), before)
    for q in ("q1", "q2"):
        assert not np.allclose(encoder_gradient(changed(learner, q)), before)


def test_the_encoder_learns_nothing_where_q_functions_do_not_look_at_z_and_kl_has_no_weight(draw):
    settings = small(kl_weight=0)
    learner, minibatch = draw.learner(settings), draw.minibatch()
    for q in ("q1", "q2"):
        learner.extra[f"{q}.hidden_0.kernel"][-Z:] = 0
    gradients, _, _ = step(settings, learner, minibatch)
    assert not gradients["encoder"].any()
    assert gradients["policy"].any()
    assert gradients["v"].any()


def test_no_transition_is_taken_to_tell_more_than_a_variance_of_1e_7_does():
    found = posterior(torch.tensor([[[0.5, -100.0], [1.5, -100.0]]], dtype=torch.float64))
    assert (found.mean.item(), found.variance.item()) == pytest.approx((1.0, 0.5e-7))


def test_kl_is_summed_over_tasks(draw):
    settings = small()
    learner = draw.learner(settings, np.float64)
    for q in ("q1", "q2"):
        learner.extra[f"{q}.hidden_0.kernel"][-Z:] = 0  # the encoder hears from the KL alone
    minibatch = draw.minibatch()

    def gradient_of(tasks):
        batch, context = (
            Transitions(*(getattr(part, name)[tasks] for name in part.__dataclass_fields__))
            for part in (minibatch.transitions, minibatch.context)
        )
        return step(settings, learner, Minibatch(batch, context))[0]["encoder"]

    by_task = [gradient_of(slice(k, k + 1)) for k in range(K)]
    np.testing.assert_allclose(gradient_of(slice(None)), sum(by_task), rtol=1e-9, atol=1e-12)

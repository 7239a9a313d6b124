"""The evidence lower bound of trials at every step of them, in torch.

Zintgraf et al. 2020, arXiv:1910.08348, section 3; m is the latent variable that stands for a task.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from metaloom.pipeline.algorithms.varibad.decoders import DecodedSteps, Decoders
from metaloom.pipeline.nn.distributions import DiagGaussian
from metaloom.pipeline.policies.inferring import Encoder


@dataclass(frozen=True)
class TrialTensors:
    """N trials of up to L steps that a gradient step of the model learns from.

    Attributes:
        inputs: [L, N, in], what the encoder sees; time first as recurrent networks take them.
        steps: all steps of them, [N, L, ...].
        lengths: [N] int64, real steps.
    """

    inputs: Tensor
    steps: DecodedSteps
    lengths: Tensor


@dataclass(frozen=True)
class Drawn:
    """What a gradient step of the model takes from chance.

    Attributes:
        at: [K, N] int64, steps whose posteriors learn; None for all steps.
        decoded: [N, D] int64, steps that are decoded; None for all.
        noise: [K, N, Z], standard normal; K is L where all steps are meant.
    """

    at: Tensor | None
    decoded: Tensor | None
    noise: Tensor


class Elbo(NamedTuple):
    """Means over trials of means over their posteriors, in nats.

    Attributes:
        rewards: log-likelihood of the rewards of a whole trial.
        states: of its next observations; 0 where they are not decoded.
        kl: divergence of a posterior from the one before.
    """

    rewards: Tensor
    states: Tensor
    kl: Tensor


def kl_between(posterior: DiagGaussian, prior: DiagGaussian) -> Tensor:
    """KL(posterior ‖ prior) = Σ log σ' - log σ + (σ² + (μ - μ')²) / 2σ'² - ½, in nats: [...]."""
    # DiagGaussian.kl adds to the denominator, as ProMP does, which shows where posteriors are narrow.
    log_ratio = prior.log_std - posterior.log_std
    squares = (posterior.mean - prior.mean).square() * (-2 * prior.log_std).exp()
    return (log_ratio + 0.5 * ((-2 * log_ratio).exp() + squares - 1)).sum(-1)


def priors_of(posteriors: DiagGaussian) -> DiagGaussian:
    """Return the prior of every posterior [L, N, Z]: the one before it, N(0, I) for the first."""
    return DiagGaussian(*(torch.cat([torch.zeros_like(part[:1]), part[:-1]]) for part in posteriors))


def elbo(
    encoder: Encoder, decoders: Decoders, params: Mapping[str, Tensor], trials: TrialTensors, drawn: Drawn
) -> Elbo:
    """Return the parts of E_q(m|τ_:t)[log p(τ | m)] - KL(q(m|τ_:t) ‖ q(m|τ_:t-1)), in the mean over t and trials τ.

    The likelihood is that of all steps of the trial, those behind t too: what is inferred is to tell what comes.
    """
    posteriors = encoder.posteriors(params, trials.inputs)
    kl = kl_between(posteriors, priors_of(posteriors))
    lengths, L = trials.lengths.to(kl.dtype), len(trials.inputs)
    if drawn.at is None:
        weights = _real(trials.lengths, L).t() / lengths  # [L, N]
    else:
        places = drawn.at.unsqueeze(-1).expand(*drawn.at.shape, posteriors.mean.shape[-1])
        posteriors = DiagGaussian(*(part.gather(0, places) for part in posteriors))  # [K, N, Z]
        kl = kl.gather(0, drawn.at)
        weights = torch.full_like(kl, 1 / len(kl))
    latents = posteriors.mean + posteriors.log_std.exp() * drawn.noise
    if drawn.decoded is None:
        steps, shares = trials.steps, _real(trials.lengths, L).to(kl.dtype)  # [N, L]
    else:
        steps = trials.steps.at(drawn.decoded)
        shares = (lengths / drawn.decoded.shape[1])[:, None].expand(drawn.decoded.shape)
    rewards, states = ((likelihood * shares).sum(-1) for likelihood in decoders.log_likelihoods(params, latents, steps))
    return Elbo(*((part * weights).sum(0).mean() for part in (rewards, states, kl)))


def _real(lengths: Tensor, longest: int) -> Tensor:
    """[N, L] bool, where a step is real."""
    return torch.arange(longest, device=lengths.device) < lengths[:, None]

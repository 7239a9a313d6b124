"""VariBAD's model of trials: encoder, decoders, and the evidence lower bound (ELBO) of whole trials."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from metaloom.pipeline.algorithms.varibad.settings import VariBAD
from metaloom.pipeline.memory import require_room
from metaloom.pipeline.nn.distributions import LOG_2PI, DiagGaussian
from metaloom.pipeline.nn.networks import Network, affine, build_network, initialize_shapes
from metaloom.pipeline.nn.recurrent import build_cell
from metaloom.pipeline.nn.spec import MLP, NetworkSpec, Spaces
from metaloom.pipeline.policies.posterior import EMBEDDING, POSTERIOR, EncoderSizes
from metaloom.pipeline.types import Params, Shapes

REWARDS, STATES = "decoder.rewards", "decoder.states"  # name prefixes of the decoders' parameters


class Encoder:
    """Encoder that infers the task from a trial, step by step: q(m | τ_:t) = N(μ_t, σ_t²).

    Zintgraf et al. 2020, arXiv:1910.08348, section 3.1. All methods are functions of explicit parameters.
    """

    def __init__(self, sizes: EncoderSizes, input_size: int) -> None:
        self.shapes: Shapes = sizes.shapes(input_size)
        self._cell = build_cell(sizes.spec)

    def initialize(self, rng: np.random.Generator) -> Params:
        require_room(self.shapes, setting="algorithm.encoder_size or embedding_size")
        layers = {name: shape for name, shape in self.shapes.items() if name not in self._cell.shapes}
        drawn = initialize_shapes(layers, rng) | self._cell.initialize(rng)
        return {name: drawn[name] for name in self.shapes}

    def posteriors(self, params: Mapping[str, Tensor], inputs: Tensor) -> DiagGaussian:
        """Return the posteriors [L, N, Z] after each step of N whole trials [L, N, in]."""
        L, N, _ = inputs.shape
        embedded = torch.relu(affine(EMBEDDING, params, inputs.flatten(0, 1))).unflatten(0, (L, N))
        features, _ = self._cell(params, embedded, inputs.new_zeros(N, self._cell.state_size))
        outputs = affine(POSTERIOR, params, features.flatten(0, 1)).unflatten(0, (L, N))
        return DiagGaussian(*outputs.chunk(2, -1))


@dataclass(frozen=True)
class DecodedSteps:
    """D steps from each of N trials. After an episode's last step, the next observation is its final observation."""

    observations: Tensor  # [N, D, O]
    taken: Tensor  # actions, [N, D, A], one-hot if discrete
    next_observations: Tensor  # [N, D, O]
    rewards: Tensor  # [N, D]

    def at(self, steps: Tensor) -> "DecodedSteps":
        """Return each trial's steps at the given indices, [N, D'] int64."""
        trials = torch.arange(len(steps), device=steps.device)[:, None]
        return DecodedSteps(**{f.name: getattr(self, f.name)[trials, steps] for f in fields(self)})


class Decoders:
    """Decoders p(r | s, a, s', m) and, if enabled, p(s' | s, a, m), as functions of explicit parameters."""

    def __init__(self, settings: VariBAD, spaces: Spaces) -> None:
        self._settings = settings
        O, A, Z = spaces.observation_size, spaces.num_actions or spaces.action_size, settings.latent_size
        heads = settings.reward_decoder == "heads"
        self._rewards = self._network(REWARDS, Z if heads else Z + 2 * O + A, O if heads else 1)
        self._states = self._network(STATES, Z + O + A, O) if settings.decode_states else None

    def initialize(self, rng: np.random.Generator) -> Params:
        networks = [network for network in (self._rewards, self._states) if network is not None]
        require_room({n: s for of in networks for n, s in of.shapes.items()}, setting="algorithm.decoder_layers")
        return {name: value for network in networks for name, value in network.initialize(rng).items()}

    def log_likelihoods(
        self, params: Mapping[str, Tensor], latents: Tensor, steps: DecodedSteps
    ) -> tuple[Tensor, Tensor]:
        """Return log-likelihoods [K, N, D] of rewards and next observations (0 if skipped), given latents [K, N, Z]."""
        predicted = self.rewards(params, latents, steps)
        if self._settings.reward_likelihood == "bernoulli":
            positive = (steps.rewards > 0).to(predicted.dtype).expand_as(predicted)
            rewards = -binary_cross_entropy_with_logits(predicted, positive, reduction="none")
        else:
            rewards = _log_normal(steps.rewards - predicted)
        if self._states is None:
            return rewards, torch.zeros_like(rewards)
        led = self._all_pairs(self._states, params, latents, torch.cat([steps.observations, steps.taken], -1))
        return rewards, _log_normal(steps.next_observations - led).sum(-1)

    def rewards(self, params: Mapping[str, Tensor], latents: Tensor, steps: DecodedSteps) -> Tensor:
        """Return predicted rewards [K, N, D] or, with a Bernoulli likelihood, logits of a positive reward."""
        if self._settings.reward_decoder == "heads":
            heads = self._rewards(params, latents.flatten(0, 1)).unflatten(0, latents.shape[:2])
            return torch.einsum("kno,ndo->knd", heads, steps.next_observations)
        seen = torch.cat([steps.observations, steps.taken, steps.next_observations], -1)
        return self._all_pairs(self._rewards, params, latents, seen).squeeze(-1)

    def _all_pairs(self, network: Network, params: Mapping[str, Tensor], latents: Tensor, steps: Tensor) -> Tensor:
        """Return a network's outputs [K, N, D, out] for each latent [K, N, Z] and each step [N, D, in] of its trial."""
        pairs = (len(latents), *steps.shape[:2])
        inputs = torch.cat([latents.unsqueeze(2).expand(*pairs, -1), steps.expand(*pairs, -1)], -1)
        return network(params, inputs.flatten(0, 2)).unflatten(0, pairs)

    def _network(self, prefix: str, input_size: int, output_size: int) -> Network:
        layers = self._settings.decoder_layers
        return build_network(prefix, NetworkSpec(MLP, (input_size,), output_size, layers, "relu"))


def _log_normal(errors: Tensor) -> Tensor:
    """Return log N(e; 0, 1)."""
    return -0.5 * (errors.square() + LOG_2PI)


@dataclass(frozen=True)
class TrialTensors:
    """N trials of up to L steps for a gradient step of the model."""

    inputs: Tensor  # encoder inputs, [L, N, in], time first as recurrent networks require
    steps: DecodedSteps  # all steps, [N, L, ...]
    lengths: Tensor  # number of real steps per trial, [N] int64


@dataclass(frozen=True)
class RandomDraws:
    """Random draws for a gradient step of the model."""

    at: Tensor | None  # steps whose posteriors are trained, [K, N] int64; None for all L steps
    decoded: Tensor | None  # steps to decode, [N, D] int64; None for all L steps
    noise: Tensor  # standard normal, [K, N, Z]


class Elbo(NamedTuple):
    """Parts of the evidence lower bound in nats, as means over trials and their posteriors."""

    rewards: Tensor  # log-likelihood of a whole trial's rewards
    states: Tensor  # log-likelihood of its next observations; 0 if they are not decoded
    kl: Tensor  # KL divergence of a posterior from the previous one


def kl_between(posterior: DiagGaussian, prior: DiagGaussian) -> Tensor:
    """Return KL(posterior ‖ prior) = Σ log σ' - log σ + (σ² + (μ - μ')²) / 2σ'² - ½ in nats, with shape [...]."""
    # Not DiagGaussian.kl, which follows ProMP in adding ε to the denominator: that matters for narrow posteriors.
    log_ratio = prior.log_std - posterior.log_std
    squares = (posterior.mean - prior.mean).square() * (-2 * prior.log_std).exp()
    return (log_ratio + 0.5 * ((-2 * log_ratio).exp() + squares - 1)).sum(-1)


def priors_of(posteriors: DiagGaussian) -> DiagGaussian:
    """Return the prior of each posterior [L, N, Z]: the previous posterior, or N(0, I) for the first."""
    return DiagGaussian(*(torch.cat([torch.zeros_like(part[:1]), part[:-1]]) for part in posteriors))


def elbo(
    encoder: Encoder, decoders: Decoders, params: Mapping[str, Tensor], trials: TrialTensors, drawn: RandomDraws
) -> Elbo:
    """Return the parts of E_q(m|τ_:t)[log p(τ | m)] - KL(q(m|τ_:t) ‖ q(m|τ_:t-1)), averaged over t and trials τ.

    Zintgraf et al. 2020, arXiv:1910.08348, section 3; m is the latent variable of a task. The likelihood covers all
    steps of the trial, including those after t, so the posterior must predict them.
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
    """Return a mask [N, L] bool, True where a step is real."""
    return torch.arange(longest, device=lengths.device) < lengths[:, None]

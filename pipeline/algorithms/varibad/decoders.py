"""Decoders of VariBAD in torch: the likelihood of a trial's steps given a latent variable that stands for its task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from metaloom.pipeline.algorithms.varibad.settings import VariBAD
from metaloom.pipeline.memory import require_room
from metaloom.pipeline.nn.distributions import LOG_2PI
from metaloom.pipeline.nn.networks import Network, build_network
from metaloom.pipeline.nn.spec import MLP, NetworkSpec, Spaces
from metaloom.pipeline.types import Params

REWARDS, STATES = "decoder.rewards", "decoder.states"
"""Prefixes of the decoders' parameters."""


@dataclass(frozen=True)
class DecodedSteps:
    """Steps of N trials, D of each.

    Attributes:
        observations: [N, D, O].
        taken: [N, D, A], actions, one-hot where they are discrete.
        next_observations: [N, D, O], to which they led: of an episode's last step, not those of the next episode.
        rewards: [N, D].
    """

    observations: Tensor
    taken: Tensor
    next_observations: Tensor
    rewards: Tensor

    def at(self, steps: Tensor) -> DecodedSteps:
        """Some of the steps, [N, D'] int64 of each trial."""
        trials = torch.arange(len(steps), device=steps.device)[:, None]
        return DecodedSteps(**{f.name: getattr(self, f.name)[trials, steps] for f in fields(self)})


class Decoders:
    """p(r | s, a, s', m), and p(s' | s, a, m) where it is asked for. Functions of explicit parameters; holds none."""

    def __init__(self, settings: VariBAD, spaces: Spaces) -> None:
        self._settings = settings
        O, A, Z = spaces.observation_size, spaces.num_actions or spaces.action_size, settings.latent_size
        heads = settings.reward_decoder == "heads"
        self._rewards = self._network(REWARDS, Z if heads else Z + 2 * O + A, O if heads else 1)
        self._states = self._network(STATES, Z + O + A, O) if settings.decode_states else None

    def initialize(self, rng: np.random.Generator) -> Params:
        """Draw float32 parameters by name, in order."""
        networks = [network for network in (self._rewards, self._states) if network is not None]
        require_room({n: s for of in networks for n, s in of.shapes.items()}, setting="algorithm.decoder_layers")
        return {name: value for network in networks for name, value in network.initialize(rng).items()}

    def log_likelihoods(
        self, params: Mapping[str, Tensor], latents: Tensor, steps: DecodedSteps
    ) -> tuple[Tensor, Tensor]:
        """Return the log-likelihoods [K, N, D] of rewards and of next observations, given latents [K, N, Z]."""
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
        """Return predictions of rewards [K, N, D], or under a Bernoulli likelihood logits that they are positive."""
        if self._settings.reward_decoder == "heads":
            heads = self._rewards(params, latents.flatten(0, 1)).unflatten(0, latents.shape[:2])
            return torch.einsum("kno,ndo->knd", heads, steps.next_observations)
        seen = torch.cat([steps.observations, steps.taken, steps.next_observations], -1)
        return self._all_pairs(self._rewards, params, latents, seen).squeeze(-1)

    def _all_pairs(self, network: Network, params: Mapping[str, Tensor], latents: Tensor, steps: Tensor) -> Tensor:
        """Outputs [K, N, D, out] of every latent [K, N, Z] with every step [N, D, in] of its trial."""
        pairs = (len(latents), *steps.shape[:2])
        inputs = torch.cat([latents.unsqueeze(2).expand(*pairs, -1), steps.expand(*pairs, -1)], -1)
        return network(params, inputs.flatten(0, 2)).unflatten(0, pairs)

    def _network(self, prefix: str, input_size: int, output_size: int) -> Network:
        layers = self._settings.decoder_layers
        return build_network(prefix, NetworkSpec(MLP, (input_size,), output_size, layers, "relu"))


def _log_normal(errors: Tensor) -> Tensor:
    """Log N(e; 0, 1)."""
    return -0.5 * (errors.square() + LOG_2PI)

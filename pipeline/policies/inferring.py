"""A policy conditioned on a posterior over the task, in torch, and the encoder that infers it."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from metaloom.pipeline.memory import require_room
from metaloom.pipeline.nn.distributions import DiagGaussian, Distribution
from metaloom.pipeline.nn.networks import affine, initialize_shapes
from metaloom.pipeline.nn.recurrent import build_cell
from metaloom.pipeline.nn.spec import Spaces
from metaloom.pipeline.policies.build import CategoricalPolicy, GaussianPolicy
from metaloom.pipeline.policies.config import PolicyConfig
from metaloom.pipeline.policies.posterior import (
    EMBEDDING,
    POSTERIOR,
    POSTERIOR_LOG_STD,
    POSTERIOR_MEAN,
    EncoderSizes,
    encoder_input_size,
)
from metaloom.pipeline.types import Params, Shapes


class Encoder:
    """Infers a task from a trial, step by step: q(m | τ_:t) = N(μ_t, σ_t²).

    Zintgraf et al. 2020, arXiv:1910.08348, section 3.1. All methods are functions of explicit parameters.

    Attributes:
        shapes: Shapes of its parameters by name, in order.
    """

    def __init__(self, sizes: EncoderSizes, input_size: int) -> None:
        self.shapes: Shapes = sizes.shapes(input_size)
        self._cell = build_cell(sizes.spec)

    def initialize(self, rng: np.random.Generator) -> Params:
        """Draw float32 parameters by name, in order."""
        require_room(self.shapes, setting="algorithm.encoder_size or embedding_size")
        layers = {name: shape for name, shape in self.shapes.items() if name not in self._cell.shapes}
        drawn = initialize_shapes(layers, rng) | self._cell.initialize(rng)
        return {name: drawn[name] for name in self.shapes}

    def posteriors(self, params: Mapping[str, Tensor], inputs: Tensor) -> DiagGaussian:
        """Return the posteriors [L, N, Z] after every step of N whole trials [L, N, in]."""
        L, N, _ = inputs.shape
        embedded = torch.relu(affine(EMBEDDING, params, inputs.flatten(0, 1))).unflatten(0, (L, N))
        features, _ = self._cell(params, embedded, inputs.new_zeros(N, self._cell.state_size))
        outputs = affine(POSTERIOR, params, features.flatten(0, 1)).unflatten(0, (L, N))
        return DiagGaussian(*outputs.chunk(2, -1))


class InferringPolicy:
    """An encoder and a policy as functions of explicit parameters.

    Attributes:
        encoder: Encoder of trials.
        policy: Policy whose inputs are an observation and the posterior [μ, log σ].
    """

    def __init__(self, spaces: Spaces, config: PolicyConfig, sizes: EncoderSizes) -> None:
        self.encoder: Encoder = Encoder(sizes, encoder_input_size(config, spaces))
        kind = CategoricalPolicy if spaces.num_actions else GaussianPolicy
        self.policy: CategoricalPolicy | GaussianPolicy = kind(spaces, config, 2 * sizes.latent)

    def recorded(self, behavior: Mapping[str, Tensor]) -> Distribution:
        """Rebuild the distributions that acted from their recorded arrays, [...] each."""
        return self.policy.recorded(without_posterior(behavior))


def without_posterior(behavior: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the recorded arrays of the action distributions only."""
    return {name: v for name, v in behavior.items() if name not in (POSTERIOR_MEAN, POSTERIOR_LOG_STD)}

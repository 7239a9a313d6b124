"""Acting on a posterior over the task that a recurrent encoder infers from the trial so far.

Zintgraf et al. 2020, arXiv:1910.08348. The torch counterpart is in
pipeline.algorithms.varibad; the actor is in pipeline.policies.actors.on_policy.
"""

from collections.abc import Mapping
from typing import NamedTuple, TypeVar

import numpy as np

from metaloom.pipeline.nn.cells import CELL, GRU, CellSpec, cell_shapes
from metaloom.pipeline.nn.spec import Spaces, is_image
from metaloom.pipeline.policies.config import PolicyConfig
from metaloom.pipeline.policies.inference import Affine, GatedCell, check_shapes, network_inference, network_shapes
from metaloom.pipeline.policies.remembering import memory_shapes, policy_prefix
from metaloom.pipeline.schema import ConfigError
from metaloom.pipeline.types import Array, Params, Shapes, TaskParams

T = TypeVar("T")

EMBEDDING, POSTERIOR = "encoder.embedding", "encoder.posterior"
"""Parameter prefixes of the layers before and after the encoder's cell."""
POSTERIOR_MEAN, POSTERIOR_LOG_STD = "posterior_mean", "posterior_log_std"
"""Names under which rollouts record the posterior that an action is conditioned on."""


class EncoderSizes(NamedTuple):
    """Number of units in an encoder's embedding and cell, and the size Z of its latent variable."""

    embedding: int
    cell: int
    latent: int

    @classmethod
    def of(cls, params: Params) -> "EncoderSizes":
        """Infer the sizes from parameters [B, ...]; missing parts have size 0."""
        found = [params[name].shape[-1] if name in params else 0 for name in _NAMES]
        return cls(found[0], found[1] // 3, found[2] // 2)

    @property
    def spec(self) -> CellSpec:
        """CellSpec of the encoder's GRU."""
        return CellSpec(GRU, self.embedding, self.cell)

    def shapes(self, input_size: int) -> Shapes:
        """Return the shapes of the encoder's parameters, in order."""
        return {
            f"{EMBEDDING}.kernel": (input_size, self.embedding),
            f"{EMBEDDING}.bias": (self.embedding,),
            **cell_shapes(self.spec),
            f"{POSTERIOR}.kernel": (self.cell, 2 * self.latent),
            f"{POSTERIOR}.bias": (2 * self.latent,),
        }


_NAMES = (f"{EMBEDDING}.bias", f"{CELL}.hidden_bias", f"{POSTERIOR}.bias")


class PosteriorNetwork:
    """Policy network whose inputs are an observation and the posterior N(μ, σ²) as μ and log σ; see MemoryNetwork.

    e = relu(x E + b), h' = GRU(e, h), (μ, log σ) = h' W + c, where x is the input of a policy with memory. `posterior`
    is [B, E, 2 Z], μ and log σ after the last step.
    """

    def __init__(self, config: PolicyConfig, spaces: Spaces, params: TaskParams, num_rows: int) -> None:
        own = params.params
        sizes = EncoderSizes.of(own)
        self._embedding, self._layer = (Affine(own, prefix) for prefix in (EMBEDDING, POSTERIOR))
        self._cell = GatedCell(sizes.spec, own)
        self.state_size: int = self._cell.state_size
        self.latent_size: int = sizes.latent
        spec = config.network_spec(spaces, spaces.num_actions or spaces.action_size, extra_size=2 * sizes.latent)
        self._policy = network_inference(policy_prefix(spaces), spec, params, num_rows)
        self._observed, self._inferred = np.split(self._policy.inputs, [spaces.observation_size], axis=-1)
        self.posterior = np.zeros(self._inferred.shape, np.float32)

    def step(self, inputs: Array, state: Array) -> tuple[Array, Array]:
        features, after = self._cell.step(np.maximum(self._embedding(inputs), 0), state)
        self.posterior: Array = self._layer(features)
        self._observed[:] = inputs[..., : self._observed.shape[-1]]
        self._inferred[:] = self.posterior
        return self._policy.outputs(), after


def encoder_input_size(config: PolicyConfig, spaces: Spaces) -> int:
    """Return the encoder's input size: observation, last action, reward, episode end; raise ConfigError for images."""
    if is_image(spaces.observation_shape, spaces.observation_scale):
        raise ConfigError(
            f"policy: observations are images of shape {spaces.observation_shape}, from which tasks cannot be "
            "inferred; use observations that are not images, or --set 'env.wrappers=[FlattenObservation]' to "
            "treat pixels as numbers"
        )
    return spaces.observation_size + (spaces.num_actions or spaces.action_size) + 2


def check_posterior(config: PolicyConfig, params: Params, spaces: Spaces) -> None:
    """Raise ValueError unless parameters [B, ...] match a posterior-conditioned policy."""
    sizes, A = EncoderSizes.of(params), spaces.num_actions or spaces.action_size
    required = sizes.shapes(encoder_input_size(config, spaces)) | memory_shapes(params, sizes.cell, spaces)
    if not spaces.num_actions:
        required["log_std"] = (A,)
    spec = config.network_spec(spaces, A, extra_size=2 * sizes.latent)
    check_shapes(params, required | network_shapes(policy_prefix(spaces), spec))


def without_posterior(behavior: Mapping[str, T]) -> dict[str, T]:
    """Return the recorded behavior without the posterior, leaving only the action distributions' parameters."""
    return {name: value for name, value in behavior.items() if name not in (POSTERIOR_MEAN, POSTERIOR_LOG_STD)}

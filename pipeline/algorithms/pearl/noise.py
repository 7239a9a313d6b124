"""Random numbers of a gradient step of PEARL."""

from dataclasses import dataclass

from metaloom.pipeline.types import Array


@dataclass(frozen=True)
class Noise:
    """Standard normal noise of one gradient step.

    Attributes:
        latent: [K, Z], of the latent variables.
        actions: [K, N, A], of the policy's actions.
    """

    latent: Array
    actions: Array

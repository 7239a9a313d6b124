"""PEARL's networks, their initialization and their layout in a state."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from metaloom.pipeline.algorithms.contract import Setup
from metaloom.pipeline.algorithms.off_policy.learner import Layout, Stored
from metaloom.pipeline.algorithms.pearl.settings import PEARL
from metaloom.pipeline.memory import require_room
from metaloom.pipeline.nn.networks import Network, build_network
from metaloom.pipeline.nn.spec import BUILT_IN_NETWORKS
from metaloom.pipeline.policies.actors.off_policy import POLICY_NETWORK
from metaloom.pipeline.policies.config import PolicyConfig
from metaloom.pipeline.types import Params

HIDDEN_BIAS = 0.1
OUTPUT_LIMIT, POLICY_OUTPUT_LIMIT = 3e-3, 1e-3


@dataclass(frozen=True)
class PEARLNetworks:
    """The networks of a run.

    Attributes:
        policy: (o, z) to means and log standard deviations of the action before the tanh.
        encoder: (o, a, r) or (o, a, r, o') to a factor of the posterior over z.
        q: (o, a, z) to a value; the first Q-function's network, which the second copies.
        v: (o, z) to a value.
    """

    policy: Network
    encoder: Network
    q: Network
    v: Network

    @classmethod
    def build(cls, settings: PEARL, setup: Setup) -> PEARLNetworks:
        """Build the networks of a run; hidden layers use relu unless policy.activation is set."""
        A, Z = setup.action_size, settings.latent_size
        seen = A + 1 + (setup.observation_size if settings.use_next_obs_in_context else 0)
        inferred = Z * (2 if settings.use_information_bottleneck else 1)

        def network(prefix: str, config: PolicyConfig, output_size: int, extra_size: int) -> Network:
            spec = config.network_spec(setup, output_size, extra_size=extra_size, activation="relu")
            return build_network(prefix, spec)

        critic = setup.policy.critic(settings.critic_hidden_sizes)
        return cls(
            network(POLICY_NETWORK, setup.policy, 2 * A, Z),
            network("encoder", setup.policy.critic(settings.encoder_hidden_sizes), inferred, seen),
            network("q1", critic, 1, A + Z),
            network("v", critic, 1, Z),
        )

    def of(self, part: str) -> Network:
        """Return the network of a part."""
        return {"policy": self.policy, "encoder": self.encoder, "v": self.v, "target_v": self.v}.get(part, self.q)


def initialize(network: Network, rng: np.random.Generator, *, output_limit: float = OUTPUT_LIMIT) -> Params:
    """Draw a network's initial parameters, float32, in order.

    Hidden kernels are from U(±1/√in) with `in` the number of inputs of the layer, and hidden biases are 0.1; kernel and
    bias of the output from U(±output_limit), as in Lillicrap et al. 2016, arXiv:1509.02971, section 7. A custom module
    keeps its constructor's initialization.
    """
    if network.spec.name not in BUILT_IN_NETWORKS:
        return network.initialize(rng)
    require_room(network.shapes, setting=f"algorithm, network {network.prefix}")
    params: Params = {}
    for name, shape in network.shapes.items():
        layer, _, part = name.rpartition(".")
        if layer.endswith(".output"):
            value = rng.uniform(-output_limit, output_limit, shape)
        elif part == "bias":
            value = np.full(shape, HIDDEN_BIAS)
        else:
            # A dense kernel is (in, out), a convolution's (out, in, k, k).
            limit = 1 / np.sqrt(shape[0] if len(shape) == 2 else math.prod(shape[1:]))
            value = rng.uniform(-limit, limit, shape)
        params[name] = value.astype(np.float32)
    return params


TWINS = ("q1", "q2")
LAYOUT: Layout = {
    "policy": Stored("params", f"{POLICY_NETWORK}.", f"{POLICY_NETWORK}.", "policy."),
    "encoder": Stored("params", "encoder.", "encoder.", "encoder."),
    "q1": Stored("extra", "q1.", "q1.", "q.q1."),
    "q2": Stored("extra", "q2.", "q2.", "q.q2."),
    "v": Stored("extra", "v.", "v.", "v."),
    "target_v": Stored("extra", "target_v.", "v."),
}
"""Layout of the six networks; the last is the target V."""

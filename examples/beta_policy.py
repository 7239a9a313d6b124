"""A policy of one's own: Beta distributions, whose actions never leave the environment's box.

    metaloom train ppo --set env=Pendulum-v1 --set env.action_scale=1 --set policy=beta_policy:BetaPolicy

in this folder. Chou, Maturana and Scherer 2017, "Improving stochastic policy gradients in continuous control with deep
reinforcement learning using the Beta distribution", PMLR 70.
"""

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor, distributions
from torch.nn.functional import softplus

from metaloom.pipeline.nn.networks import build_network
from metaloom.pipeline.nn.spec import Spaces
from metaloom.pipeline.policies.config import PolicyConfig
from metaloom.pipeline.policies.contract import OwnPolicy


class Betas(NamedTuple):
    """Independent Beta distributions [..., A], stretched from (0, 1) to (-1, 1)."""

    alpha: Tensor
    beta: Tensor

    def _torch(self) -> distributions.Distribution:
        return distributions.Independent(distributions.Beta(self.alpha, self.beta), 1)

    def log_prob(self, actions: Tensor) -> Tensor:
        """Log-density [...], up to the constant of the stretching."""
        # Rounding may put an action onto the border, where the density is 0 or infinite.
        return self._torch().log_prob(((actions + 1) / 2).clamp(1e-6, 1 - 1e-6))

    def kl(self, other: "Betas") -> Tensor:
        """KL(self ‖ other): [...]."""
        return distributions.kl_divergence(self._torch(), other._torch())

    def entropy(self) -> Tensor:
        """Entropy [...], up to the constant of the stretching."""
        return self._torch().entropy()

    def detach(self) -> "Betas":
        """The same distributions as constants of a graph."""
        return Betas(self.alpha.detach(), self.beta.detach())

    def sample(self) -> Tensor:
        """Draw actions [..., A]."""
        return 2 * self._torch().sample() - 1

    def mode(self) -> Tensor:
        """The means, which exist where modes are on the border too."""
        return 2 * self.alpha / (self.alpha + self.beta) - 1

    def parameters(self) -> Mapping[str, Tensor]:
        """Return both parameters, to be recorded."""
        return self._asdict()


class BetaPolicy(OwnPolicy):
    """α and β of every action are 1 + softplus of the network's outputs, so that densities have one peak."""

    def __init__(self, spaces: Spaces, config: PolicyConfig) -> None:
        self.network = build_network("beta_network", config.network_spec(spaces, 2 * spaces.action_size))

    def distribution(self, params: Mapping[str, Tensor], observations: Tensor) -> Betas:
        """Distributions at observations [..., N, O]."""
        return Betas(*(1 + softplus(self.network(params, observations))).chunk(2, -1))

    def recorded(self, behavior: Mapping[str, Tensor]) -> Betas:
        """Distributions from what `parameters` gave."""
        return Betas(**behavior)

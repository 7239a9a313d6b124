"""A categorical policy whose logits are a network."""

from collections.abc import Mapping

from torch import Tensor

from metaloom.pipeline.nn.distributions import Categorical
from metaloom.pipeline.nn.networks import build_network
from metaloom.pipeline.nn.spec import Spaces
from metaloom.pipeline.policies.config import PolicyConfig
from metaloom.pipeline.policies.contract import Policy
from metaloom.pipeline.policies.inference import LOGITS_NETWORK


class CategoricalPolicy(Policy):
    """For discrete actions; `extra_size` numbers stand behind an observation. See Policy."""

    def __init__(self, spaces: Spaces, config: PolicyConfig, extra_size: int = 0) -> None:
        spec = config.network_spec(spaces, spaces.num_actions, extra_size=extra_size)
        self.network = build_network(LOGITS_NETWORK, spec)

    def distribution(self, params: Mapping[str, Tensor], observations: Tensor) -> Categorical:
        """Return the distribution of actions [..., N]; see Policy."""
        return self.head(self.network(params, observations))

    def head(self, logits: Tensor) -> Categorical:
        """Return the distribution of actions given the network's output."""
        return Categorical.of_logits(logits)

    def recorded(self, behavior: Mapping[str, Tensor]) -> Categorical:
        """Rebuild the distribution of actions that acted from what was recorded of it."""
        return Categorical(**behavior)

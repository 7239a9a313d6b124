"""Acting on a posterior over the task."""

from metaloom.pipeline.policies.actors.contract import ActorSetup
from metaloom.pipeline.policies.actors.recurrent import RecurrentActor
from metaloom.pipeline.policies.posterior import POSTERIOR_LOG_STD, POSTERIOR_MEAN, PosteriorNetwork
from metaloom.pipeline.types import Array


class PosteriorActor(RecurrentActor):
    """Acts on what a recurrent encoder has inferred of the task, and records it. See RecurrentActor.

    Zintgraf et al. 2020, arXiv:1910.08348.
    """

    make_network = PosteriorNetwork

    def __init__(self, setup: ActorSetup) -> None:
        super().__init__(setup)
        network = self._remembering.network
        assert isinstance(network, PosteriorNetwork)
        self._network, Z = network, network.latent_size
        self._means, self._log_stds = (self._record(name, Z) for name in (POSTERIOR_MEAN, POSTERIOR_LOG_STD))

    def act(self, t: int, observations: Array, rows: Array) -> Array:
        """Actions [n, ...]; see Actor."""
        actions = super().act(t, observations, rows)
        Z = self._network.latent_size
        posterior = self._network.posterior.reshape(-1, 2 * Z)[rows]
        self._means[t, rows], self._log_stds[t, rows] = posterior[:, :Z], posterior[:, Z:]
        return actions

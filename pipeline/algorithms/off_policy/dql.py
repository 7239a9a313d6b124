"""Deep Q-learning in torch: the gradient step for any network and device, and the learner.

Mnih et al. 2015, doi:10.1038/nature14236, algorithm 1.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import huber_loss

from metaloom.pipeline.algorithms.contract import NUM_UPDATES, Setup
from metaloom.pipeline.algorithms.off_policy.learner import Layout, OffPolicyLearner, Stored, TorchGradientSteps, merged
from metaloom.pipeline.algorithms.off_policy.parts import transitions_like
from metaloom.pipeline.algorithms.off_policy.settings import DQL
from metaloom.pipeline.nn.networks import Network, build_network
from metaloom.pipeline.policies.actors.off_policy import EPSILON, Q_NETWORK
from metaloom.pipeline.seeding import generator
from metaloom.pipeline.types import LearnerState, Metrics, Minibatch, TaskParams

METRICS = ("q_loss", "q_mean", "target_mean", "gradient_norm")  # names of the metrics that a gradient step returns
LAYOUT: Layout = {
    "q": Stored("params", f"{Q_NETWORK}.", f"{Q_NETWORK}.", "q."),
    "target": Stored("extra", "target_q.", f"{Q_NETWORK}."),
}
"""Locations of the Q-function and its target network in the state."""


def td_targets(rewards: Tensor, continuing: Tensor, next_values: Tensor) -> Tensor:
    """Return the TD targets y = r + γ (1 - terminated) max_b Q̄(o', b), [n], with `continuing` = γ (1 - terminated)."""
    return rewards + continuing * next_values.amax(1)


def q_loss(values: Tensor, actions: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean Huber loss of the errors Q(o, a) - y, and the values Q(o, a) of the stored actions a, [n].

    The paper clips errors to [-1, 1], which gives the same gradient. SimuRLacra instead uses the value of the best
    action.
    """
    taken = values.gather(1, actions[:, None])[:, 0]
    return huber_loss(taken, targets), taken


class DQLDefinition(TorchGradientSteps[None]):
    """DQL's gradient steps in torch, on working copies of the Q-function and its target network."""

    layout: ClassVar[Layout] = LAYOUT
    _settings: DQL
    _networks: Network

    def prepare(self) -> None:
        self._q, self._target = self.copies["q"], self.copies["target"]

    def step(self, minibatch: Minibatch, noise: None = None) -> dict[str, Tensor]:
        """Take a gradient step; every `target_update_intvl` steps, copy Q to Q̄."""
        batch = transitions_like(self._q.vector, merged(minibatch))
        with torch.no_grad():
            next_values = self._networks(self._target.params, batch.next_observations)
        targets = td_targets(batch.rewards, self._discount * (1 - batch.terminated), next_values)
        loss, values = q_loss(self._networks(self._q.params, batch.observations), batch.actions, targets)
        norm = self._q.down(loss, self._rates["q"], self._settings.max_grad_norm)
        if self.counts_to(self._settings.target_update_intvl):
            self._target.vector.copy_(self._q.vector)
        described = (loss, values.mean(), targets.mean(), norm)
        return dict(zip(METRICS, (value.detach() for value in described), strict=True))


class DQLLearner(OffPolicyLearner[object, None]):
    definition: ClassVar[type[TorchGradientSteps[Any]]] = DQLDefinition
    metrics: ClassVar[tuple[str, ...]] = METRICS
    finite: ClassVar[Mapping[str, str]] = {"q": "the Q-function"}
    settings: DQL

    def __init__(self, settings: DQL, setup: Setup) -> None:
        super().__init__(settings, setup, discrete=True)
        spec = setup.policy.network_spec(setup, setup.num_actions, activation="relu")
        self.networks: Network = build_network(Q_NETWORK, spec)
        self.set_up({"q": settings.learning_rate}, self.networks)

    def initialize(self, *, run_seed: int) -> LearnerState:
        params = self.networks.initialize(generator(run_seed, "initialize"))
        return self.first_state({"q": params, "target": {name: value.copy() for name, value in params.items()}})

    def acting_params(self, state: LearnerState, num_tasks: int) -> TaskParams:
        return _acting_with(self._epsilon(state), state, num_tasks)

    def filling_params(self, state: LearnerState, num_tasks: int) -> TaskParams:
        return _acting_with(self.settings.eps_final, state, num_tasks)

    def noise(self, minibatch: Minibatch, rng: np.random.Generator) -> None:
        """Return None, since DQL's gradient steps need no noise."""

    def described(self, state: LearnerState) -> Metrics:
        return {"epsilon": self._epsilon(state), "learning_rate": self.rates(state)["q"]}

    def _epsilon(self, state: LearnerState) -> float:
        return self.settings.epsilon(int(state.extra[NUM_UPDATES]))


def _acting_with(epsilon: float, state: LearnerState, num_tasks: int) -> TaskParams:
    return TaskParams.broadcast(state.params | {EPSILON: np.array(epsilon, np.float32)}, num_tasks)

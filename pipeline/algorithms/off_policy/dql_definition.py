"""Deep Q-learning in torch: the definition of its gradient step, for any network and on any device.

Mnih et al. 2015, doi:10.1038/nature14236, algorithm 1.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import huber_loss

from metaloom.pipeline.algorithms.off_policy.gradient_steps import Counters, merged
from metaloom.pipeline.algorithms.off_policy.parts import transitions_like
from metaloom.pipeline.algorithms.off_policy.settings import DQL
from metaloom.pipeline.nn.flat_networks import prefixed, unprefixed
from metaloom.pipeline.nn.flat_tensors import Descent, FlatTensors
from metaloom.pipeline.nn.networks import Network
from metaloom.pipeline.types import LearnerState, Minibatch

METRICS = ("q_loss", "q_mean", "target_mean", "gradient_norm")
"""Names of the metrics of a gradient step."""
Q, TARGET = "q", "target_q"
"""Prefixes of the optimizer's state and of the target network."""


def td_targets(rewards: Tensor, continuing: Tensor, next_values: Tensor) -> Tensor:
    """TD targets y = r + γ (1 - terminated) max_b Q̄(o', b), [n].

    Args:
        rewards: [n].
        continuing: [n], γ where the task goes on and 0 where it terminated.
        next_values: [n, number of actions], of the target network.
    """
    return rewards + continuing * next_values.amax(1)


def q_loss(values: Tensor, actions: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Mean of huber(Q(o, a) - y) over stored actions a, huber(e) = e² / 2 where |e| < 1, |e| - ½ elsewhere.

    The paper clips errors to [-1, 1]: the same gradient. Differs from SimuRLacra, which learns the best action's value.

    Args:
        values: [n, number of actions].
        actions: [n].
        targets: [n].

    Returns:
        The loss, and the values Q(o, a), [n].
    """
    taken = values.gather(1, actions[:, None])[:, 0]
    return huber_loss(taken, targets), taken


class DQLDefinition:
    """Q-function and target network while an iteration changes them.

    Attributes:
        q: the Q-function's parameters.
    """

    def __init__(
        self,
        settings: DQL,
        network: Network,
        state: LearnerState,
        *,
        discount: float,
        learning_rate: float,
        device: torch.device,
    ) -> None:
        self._settings, self._discount, self._network = settings, discount, network
        self._counters, self._learning_rate = Counters.of(state), learning_rate
        self.q = FlatTensors(state.params, device)
        self._target = FlatTensors(prefixed(unprefixed(state.extra, TARGET), network.prefix), device)
        self._descent = Descent(settings.optimizer, self.q, unprefixed(state.optimizer, Q))

    def step(self, minibatch: Minibatch, noise: None = None) -> dict[str, Tensor]:
        """Take a step down the loss; every `target_update_intvl` steps Q̄ becomes Q. Nothing is drawn."""
        batch = transitions_like(self.q.vector, merged(minibatch))
        with torch.no_grad():
            next_values = self._network(self._target.params, batch.next_observations)
        targets = td_targets(batch.rewards, self._discount * (1 - batch.terminated), next_values)
        loss, values = q_loss(self._network(self.q.params, batch.observations), batch.actions, targets)
        norm = self._descent.down(loss, self._learning_rate, self._settings.max_grad_norm)
        self._counters.gradient_steps += 1
        if self._counters.gradient_steps % self._settings.target_update_intvl == 0:
            self._target.vector.copy_(self.q.vector)
        described = (loss, values.mean(), targets.mean(), norm)
        return dict(zip(METRICS, (value.detach() for value in described), strict=True))

    def state(self) -> LearnerState:
        self._counters.updates += 1
        target = prefixed(unprefixed(self._target.copies(), self._network.prefix), TARGET)
        optimizer = prefixed(self._descent.state, Q)
        return LearnerState(self.q.copies(), optimizer, target | self._counters.arrays())

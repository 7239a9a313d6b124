"""Deep Q-learning in torch: the definition of its gradient step, for any network and on any device, and its learner.

Mnih et al. 2015, doi:10.1038/nature14236, algorithm 1.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import huber_loss

from metaloom.pipeline.algorithms.contract import Kernel, Setup
from metaloom.pipeline.algorithms.kernel_choice import fused
from metaloom.pipeline.algorithms.off_policy.learner import Counters, GradientSteps, OffPolicyLearner, merged
from metaloom.pipeline.algorithms.off_policy.parts import transitions_like
from metaloom.pipeline.algorithms.off_policy.settings import DQL
from metaloom.pipeline.nn.flat_networks import prefixed, unprefixed
from metaloom.pipeline.nn.flat_tensors import Descent, FlatTensors
from metaloom.pipeline.nn.networks import Network, build_network
from metaloom.pipeline.nn.schedules import lr_factor
from metaloom.pipeline.nn.torch_optimizers import initial_state
from metaloom.pipeline.policies.actors.off_policy import EPSILON, Q_NETWORK
from metaloom.pipeline.seeding import generator
from metaloom.pipeline.types import LearnerState, Metrics, Minibatch, ParallelMap, Params, TaskParams

METRICS = ("q_loss", "q_mean", "target_mean", "gradient_norm")
"""Names of the metrics of a gradient step."""
Q, TARGET = "q", "target_q"
"""Prefixes of the optimizer's state and of the target network."""


def td_targets(rewards: Tensor, continuing: Tensor, next_values: Tensor) -> Tensor:
    """Return the TD targets y = r + γ (1 - terminated) max_b Q̄(o', b), [n].

    Args:
        rewards: [n].
        continuing: [n], γ where the task continues and 0 where it terminated.
        next_values: [n, number of actions], of the target network.
    """
    return rewards + continuing * next_values.amax(1)


def q_loss(values: Tensor, actions: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean of huber(Q(o, a) - y) over stored actions a, huber(e) = e² / 2 where |e| < 1, |e| - ½ elsewhere.

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
    """Working copies of Q-function and target network during an iteration."""

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
        self.q: FlatTensors = FlatTensors(state.params, device)
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


class DQLLearner(OffPolicyLearner[object, None]):
    """DQL for one run; see Learner."""

    metrics: ClassVar[tuple[str, ...]] = METRICS

    def __init__(self, settings: DQL, setup: Setup) -> None:
        super().__init__(settings.name, setup, discrete=True)
        self.settings: DQL = settings
        self._lr_factor = lr_factor(settings, settings.learning_rate)
        spec = setup.policy.network_spec(setup, setup.num_actions, activation="relu")
        self.network: Network = build_network(Q_NETWORK, spec)
        self.kernel: Kernel = self.choose_kernel(settings.kernel, settings.optimizer, self.network)

    def initialize(self, *, run_seed: int) -> LearnerState:
        """Return a Q-function, and a target network that equals it; see Learner."""
        params = self.network.initialize(generator(run_seed, "initialize"))
        targets = {name: value.copy() for name, value in unprefixed(params, Q_NETWORK).items()}
        optimizer = prefixed(initial_state(self.settings.optimizer, params), Q)
        return LearnerState(params, optimizer, prefixed(targets, TARGET) | Counters(0, 0).arrays())

    def acting_params(self, state: LearnerState, num_tasks: int) -> TaskParams:
        return _acting_with(self._epsilon(state), state, num_tasks)

    def filling_params(self, state: LearnerState, num_tasks: int) -> TaskParams:
        """Return the Q-function with the `epsilon` of the end of training; see OffPolicyLearner."""
        return _acting_with(self.settings.eps_final, state, num_tasks)

    def gradient_steps(self, state: LearnerState, *, parallel: ParallelMap = map) -> GradientSteps[None]:
        """Return the gradient steps; a single small network needs no parallel map."""
        of, rate = (self.settings, self.network, state), self._learning_rate(state)
        discount = self._setup.processing.discount
        if self.kernel.name == "fused":
            return fused(DQLDefinition)(*of, discount=discount, learning_rate=rate)
        return DQLDefinition(*of, discount=discount, learning_rate=rate, device=self._device)

    def noise(self, minibatch: Minibatch, rng: np.random.Generator) -> None:
        """Draw nothing."""

    def networks_of(self, state: LearnerState) -> dict[str, Params]:
        return {"the Q-function": state.params}

    def described(self, state: LearnerState) -> Metrics:
        return {"epsilon": self._epsilon(state), "learning_rate": self._learning_rate(state)}

    def _epsilon(self, state: LearnerState) -> float:
        return self.settings.epsilon(Counters.of(state).updates)

    def _learning_rate(self, state: LearnerState) -> float:
        return self.settings.learning_rate * self._lr_factor(Counters.of(state).updates)


def _acting_with(epsilon: float, state: LearnerState, num_tasks: int) -> TaskParams:
    return TaskParams.broadcast(state.params | {EPSILON: np.array(epsilon, np.float32)}, num_tasks)

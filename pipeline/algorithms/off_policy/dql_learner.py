"""Deep Q-learning as the stages use it. Mnih et al. 2015, doi:10.1038/nature14236, algorithm 1."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from metaloom.pipeline.algorithms.off_policy import progress
from metaloom.pipeline.kernels.flat_networks import FlatParams, Network, layer_paths, prefixed, unprefixed
from metaloom.pipeline.nn.mlp import initialize_mlp, layer_names
from metaloom.pipeline.nn.optimizers import RMSpropInPlace
from metaloom.pipeline.policies.actors.q_values import EPSILON, Q_NETWORK
from metaloom.pipeline.policies.off_policy import OffPolicyPolicy
from metaloom.pipeline.seeding import generator
from metaloom.pipeline.types import Array, LearnerState, Metrics, Minibatch, ParallelMap, TaskParams, Transitions

if TYPE_CHECKING:
    from metaloom.pipeline.algorithms.off_policy.dql import DQL

TARGET = "target_q"
Q = "q"
"""Prefix of the optimizer's state."""


@dataclass(frozen=True)
class DQLLearner:
    """DQL with what it needs to know of the run.

    Attributes:
        settings: the algorithm's.
        discount: γ.
    """

    settings: DQL
    discount: float

    def initialize(self, policy: OffPolicyPolicy, *, run_seed: int) -> LearnerState:
        """The learner before the first iteration, whose target network equals its Q-function."""
        rng = generator(run_seed, "initialize")
        sizes = (policy.observation_size, policy.config.hidden_sizes, policy.num_choices)
        params = initialize_mlp(Q_NETWORK, *sizes, rng)
        targets = {name: value.copy() for name, value in unprefixed(params, Q_NETWORK).items()}
        return LearnerState(
            params,
            prefixed(RMSpropInPlace.initial(FlatParams(params).vector), Q),
            prefixed(targets, TARGET) | progress.counters(0, 0),
        )

    def acting_params(self, learner: LearnerState, num_tasks: int) -> TaskParams:
        """What every task acts with: the Q-function, and `epsilon` [B] of the coming iteration."""
        return _acting_with(self.settings.epsilon(progress.num_updates(learner)), learner, num_tasks)

    def refill_params(self, learner: LearnerState, num_tasks: int) -> TaskParams:
        """What a Q-function that was trained before fills the memory with: `epsilon` is that of the end of training."""
        return _acting_with(self.settings.eps_final, learner, num_tasks)

    def update(
        self,
        policy: OffPolicyPolicy,
        learner: LearnerState,
        minibatches: Iterable[Minibatch],
        *,
        run_seed: int,
        iteration: int,
        parallel: ParallelMap = map,
    ) -> tuple[LearnerState, Metrics]:
        """One gradient step per minibatch, none of which has anything random.

        Args:
            policy: sizes.
            learner: is left as it is.
            minibatches: [K, N] transitions each, whose tasks do not matter; actions are numbers of choices.
            run_seed: of the run.
            iteration: of the run.
            parallel: a single small network has nothing to share out.

        Raises:
            NumericalError: if parameters are not finite afterwards.
        """
        del run_seed, iteration, parallel
        update = DQLUpdate(self.settings, policy, learner, self.discount)
        each = (update.step(progress.merged(minibatch.transitions)) for minibatch in minibatches)
        metrics = progress.means(DQLUpdate.METRICS, each)
        metrics["epsilon"] = self.settings.epsilon(progress.num_updates(learner))
        metrics["learning_rate"] = update.learning_rate
        progress.require_finite_params({"Q-function": update.q})
        return update.learner(), metrics


def _acting_with(epsilon: float, learner: LearnerState, num_tasks: int) -> TaskParams:
    return TaskParams.broadcast(learner.params | {EPSILON: np.array(epsilon, np.float32)}, num_tasks)


class DQLUpdate:
    """Q-function and target network while an iteration changes them.

    Attributes:
        q: the Q-function's parameters.
        learning_rate: of this iteration.
    """

    METRICS: ClassVar[tuple[str, ...]] = ("q_loss", "q_mean", "target_mean", "gradient_norm")
    """What describes a gradient step."""

    def __init__(self, settings: DQL, policy: OffPolicyPolicy, learner: LearnerState, discount: float) -> None:
        self._settings, self._discount = settings, discount
        self._num_updates = progress.num_updates(learner)
        self._num_steps = progress.num_gradient_steps(learner)
        self.learning_rate = settings.learning_rate * settings.lr_factor(self._num_updates)
        num_hidden = len(policy.config.hidden_sizes)
        self.q = FlatParams(learner.params)
        self._network = Network(self.q, layer_paths(Q_NETWORK, num_hidden), "relu")
        self._target = FlatParams(unprefixed(learner.extra, TARGET))
        self._target_network = Network(self._target, layer_names(num_hidden), "relu")
        self._optimizer = RMSpropInPlace.of(unprefixed(learner.optimizer, Q))

    def step(self, batch: Transitions) -> Metrics:
        """Descend the Huber loss of Q(o, a) against r + γ (1 - terminated) max Q̄(o', ·) on N transitions."""
        rows = np.arange(len(batch.rewards))
        following = self._target_network.forward(batch.next_observations).max(axis=1)
        goals = batch.rewards + self._discount * (~batch.terminated * following)
        values = self._network.forward(batch.observations)
        chosen = values[rows, batch.actions]
        loss, slopes = huber_loss(chosen - goals)
        gradient = np.zeros_like(values)
        gradient[rows, batch.actions] = slopes
        self._network.backward(gradient)
        norm = self.q.clip_gradient(self._settings.max_grad_norm)
        self._optimizer.step(self.q.vector, self.q.gradient, self.learning_rate)
        self._num_steps += 1
        if self._num_steps % self._settings.target_update_intvl == 0:
            self._target.vector[:] = self.q.vector
        return {
            "q_loss": loss,
            "q_mean": float(chosen.mean()),
            "target_mean": float(goals.mean()),
            "gradient_norm": norm,
        }

    def learner(self) -> LearnerState:
        """The learner after these gradient steps."""
        return LearnerState(
            self.q.copies(),
            prefixed(self._optimizer.state, Q),
            prefixed(self._target.copies(), TARGET) | progress.counters(self._num_updates + 1, self._num_steps),
        )


def huber_loss(errors: Array) -> tuple[float, Array]:
    """Mean of e² / 2 where |e| < 1 and |e| - ½ elsewhere, and its derivatives, [n]. Huber 1964."""
    clipped = np.clip(errors, -1, 1)
    return float((clipped * (errors - 0.5 * clipped)).mean()), clipped / np.float32(len(errors))

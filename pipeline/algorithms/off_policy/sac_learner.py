"""Soft actor-critic as the stages use it. Haarnoja et al. 2018, arXiv:1812.05905, algorithm 1."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from metaloom.pipeline.algorithms.off_policy import progress
from metaloom.pipeline.algorithms.off_policy.sac_update import ENT_COEFF, POLICY, Q, SACUpdate
from metaloom.pipeline.algorithms.off_policy.twin_q import TwinQ
from metaloom.pipeline.kernels.flat_networks import FlatParams, prefixed
from metaloom.pipeline.nn.mlp import initialize_mlp
from metaloom.pipeline.nn.optimizers import AdamInPlace
from metaloom.pipeline.policies.actors.tanh_gaussian import POLICY_NETWORK
from metaloom.pipeline.policies.off_policy import OffPolicyPolicy
from metaloom.pipeline.seeding import generator
from metaloom.pipeline.types import LearnerState, Metrics, Minibatch, ParallelMap, TaskParams

if TYPE_CHECKING:
    from metaloom.pipeline.algorithms.off_policy.sac import SAC


@dataclass(frozen=True)
class SACLearner:
    """SAC with what it needs to know of the run.

    Attributes:
        settings: the algorithm's.
        discount: γ.
    """

    settings: SAC
    discount: float

    def initialize(self, policy: OffPolicyPolicy, *, run_seed: int) -> LearnerState:
        """The learner before the first iteration: two Q-functions that differ, and targets equal to them."""
        rng = generator(run_seed, "initialize")
        O, A = policy.observation_size, policy.action_size
        params = initialize_mlp(POLICY_NETWORK, O, policy.config.hidden_sizes, 2 * A, rng)
        q = TwinQ.initial(O + A, self.settings.critic_hidden_sizes, rng)
        targets = {f"target_{name}": value.copy() for name, value in q.items()}
        log_alpha = np.array(np.log(self.settings.ent_coeff_init), np.float32)
        return LearnerState(
            params,
            prefixed(AdamInPlace.initial(FlatParams(params).vector), POLICY)
            | prefixed(AdamInPlace.initial(FlatParams(q).vector), Q)
            | prefixed(AdamInPlace.initial(log_alpha.reshape(1)), ENT_COEFF),
            {**q, **targets, "log_alpha": log_alpha, **progress.counters(0, 0)},
        )

    def acting_params(self, learner: LearnerState, num_tasks: int) -> TaskParams:
        """What every task acts with: the policy's network."""
        return TaskParams.broadcast(learner.params, num_tasks)

    def refill_params(self, learner: LearnerState, num_tasks: int) -> TaskParams:
        """What a policy that was trained before fills the memory with: it explores as it always does."""
        return self.acting_params(learner, num_tasks)

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
        """One gradient step per minibatch.

        Args:
            policy: sizes.
            learner: is left as it is.
            minibatches: [K, N] transitions each, whose tasks do not matter; actions in [-1, 1].
            run_seed: with `iteration`, where the noise of actions comes from.
            iteration: of the run.
            parallel: maps over the two Q-functions; the result does not depend on it.

        Raises:
            NumericalError: if parameters are not finite afterwards.
        """
        rng = generator(run_seed, "updates", iteration)
        update = SACUpdate(self.settings, policy, learner, self.discount, rng, parallel=parallel)
        each = (update.step(progress.merged(minibatch.transitions)) for minibatch in minibatches)
        metrics = progress.means(SACUpdate.METRICS, each) | {"learning_rate": update.learning_rate}
        progress.require_finite_params({"policy": update.policy, "Q-functions": update.q.flat})
        return update.learner(), metrics

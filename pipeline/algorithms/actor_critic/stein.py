"""Stein's variational direction over particles, and the learner that follows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from metaloom.pipeline.algorithms.actor_critic.experience import Experience
from metaloom.pipeline.algorithms.actor_critic.learner import ActorCriticLearner
from metaloom.pipeline.algorithms.actor_critic.particle import Particle, Policy, initial_learner
from metaloom.pipeline.algorithms.actor_critic.svpg import SVPG
from metaloom.pipeline.algorithms.contract import NUM_UPDATES
from metaloom.pipeline.seeding import generator
from metaloom.pipeline.types import Array, EpisodeBatch, LearnerState, Metrics, Params, TaskParams


def median_bandwidth(particles: Array) -> float:
    """h² = median over pairs of ‖x_i - x_j‖² / (2 log(n + 1)), of particles [n, D]; 1 where all are in one place."""
    n = len(particles)
    squares = _squared_distances(particles)[np.triu_indices(n, 1)]
    median = float(np.median(squares)) if n > 1 else 0.0
    return 0.5 * median / float(np.log(n + 1)) if median > 0 else 1.0


def stein_direction(particles: Array, scores: Array, bandwidth: float) -> Array:
    """φ(x_i) = (1/n) Σ_j [ k(x_j, x_i) s_j + ∇_{x_j} k(x_j, x_i) ], the way up for every particle.

    Liu and Wang 2016, arXiv:1608.04471, eq. 8, with k = exp(-‖x_j - x_i‖² / (2 h²)).

    Args:
        particles: x [n, D].
        scores: s [n, D], gradients of the log-density that the particles are to be spread over.
        bandwidth: h².

    Returns:
        [n, D] float64.
    """
    x = particles.astype(np.float64)
    kernel = np.exp(-_squared_distances(x) / (2 * bandwidth))
    # Σ_j ∇_{x_j} k(x_j, x_i) = Σ_j k_ij (x_i - x_j) / h²: away from the others.
    repulsion = (kernel.sum(axis=1, keepdims=True) * x - kernel @ x) / bandwidth
    return (kernel @ scores.astype(np.float64) + repulsion) / len(x)


def _squared_distances(x: Array) -> Array:
    gaps = x[:, None, :].astype(np.float64) - x[None, :, :]
    return np.square(gaps).sum(axis=-1)


@dataclass(frozen=True)
class SVPGLearner(ActorCriticLearner):
    """Particles on the task axis; every stored parameter has a leading axis [n] of particles.

    Attributes:
        svpg: settings of the particles together; `settings` are those of each.
    """

    svpg: SVPG

    def initialize(self, policy: Policy, *, run_seed: int) -> LearnerState:
        """The learner before the first iteration."""
        return self.with_counters(self._fresh(policy, run_seed, 0))

    def acting_params(self, learner: LearnerState, num_tasks: int) -> TaskParams:
        """Task b acts with particle b, counted round where there are more tasks than particles."""
        places = np.arange(num_tasks) % self.svpg.num_particles
        return TaskParams({name: value[places] for name, value in learner.params.items()})

    def experiences(self, episodes: EpisodeBatch) -> list[Experience]:
        """Every particle learns from its own episodes."""
        return [Experience(episodes, slice(j, j + 1)) for j in range(self.svpg.num_particles)]

    def split(self, learner: LearnerState) -> list[LearnerState]:
        """The learner of every particle; counters belong to all together."""
        n = self.svpg.num_particles

        def of(arrays: Params, j: int) -> Params:
            return {name: value[j] for name, value in arrays.items() if value.shape[:1] == (n,)}

        parts = (learner.params, learner.optimizer, learner.extra)
        return [LearnerState(*(of(arrays, j) for arrays in parts)) for j in range(n)]

    def joined(self, learners: Sequence[LearnerState]) -> LearnerState:
        """One learner with a leading axis of particles."""

        def stacked(parts: Sequence[Params]) -> Params:
            return {name: np.stack([part[name] for part in parts]) for name in parts[0]}

        return LearnerState(
            stacked([learner.params for learner in learners]),
            stacked([learner.optimizer for learner in learners]),
            stacked([learner.extra for learner in learners]),
        )

    def directions(self, particles: Sequence[Particle], num_updates: int) -> tuple[list[Array], Metrics]:
        """Against Stein's direction, since optimizers descend."""
        temperature = self.svpg.temperature * self.svpg.temperature_decay**num_updates
        x = np.stack([particle.policy.vector for particle in particles])
        scores = np.stack([particle.policy.gradient for particle in particles]).astype(np.float64) / -temperature
        if self.svpg.prior_std is not None:
            scores -= x / self.svpg.prior_std**2
        bandwidth = median_bandwidth(x)
        upward = stein_direction(x, scores, bandwidth) * particles[0].learned
        metrics = {"temperature": temperature, "kernel_bandwidth": bandwidth}
        return list((-upward).astype(np.float32)), metrics

    def begun(self, policy: Policy, learner: LearnerState, *, run_seed: int) -> LearnerState:
        """The learner as an iteration acts and learns with it: behind a horizon, fresh particles.

        Not the update at its end makes them, so that what is stored, evaluated and exported then has learned.
        """
        num_updates = int(learner.extra[NUM_UPDATES])
        if self.svpg.horizon is None or num_updates == 0 or num_updates % self.svpg.horizon:
            return learner
        fresh = self._fresh(policy, run_seed, num_updates)
        return LearnerState(fresh.params, fresh.optimizer, learner.extra | fresh.extra)

    def _fresh(self, policy: Policy, run_seed: int, num_updates: int) -> LearnerState:
        places = range(self.svpg.num_particles)
        return self.joined(
            [initial_learner(self.settings, policy, generator(run_seed, "initialize", j, num_updates)) for j in places]
        )

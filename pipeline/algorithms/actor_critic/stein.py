"""The Stein variational direction of a set of particles, and SVPG's learner."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor

from metaloom.pipeline.algorithms.actor_critic.gradient_steps import ActorCriticSteps
from metaloom.pipeline.algorithms.actor_critic.learner import ActorCriticLearner
from metaloom.pipeline.algorithms.actor_critic.settings import SVPG
from metaloom.pipeline.algorithms.contract import NUM_UPDATES, Setup
from metaloom.pipeline.estimation.experience import Experience
from metaloom.pipeline.seeding import generator
from metaloom.pipeline.types import Array, EpisodeBatch, LearnerState, Metrics, Params, TaskParams


def median_bandwidth(particles: Array) -> float:
    """Return h², the median over pairs of ‖x_i - x_j‖² / (2 log(n + 1)) for particles [n, D], or 1 if it is 0."""
    n = len(particles)
    squares = _squared_distances(particles)[np.triu_indices(n, 1)]
    median = float(np.median(squares)) if n > 1 else 0.0
    return 0.5 * median / float(np.log(n + 1)) if median > 0 else 1.0


def stein_direction(particles: Array, scores: Array, bandwidth: float) -> Array:
    """Return φ(x_i) = (1/n) Σ_j [ k(x_j, x_i) s_j + ∇_{x_j} k(x_j, x_i) ], each particle's ascent direction.

    Liu and Wang 2016, arXiv:1608.04471, eq. 8, with k = exp(-‖x_j - x_i‖² / (2 h²)) and bandwidth h². The scores s are
    gradients of the log target density. All arrays are [n, D].
    """
    x = particles.astype(np.float64)
    kernel = np.exp(-_squared_distances(x) / (2 * bandwidth))
    # Σ_j ∇_{x_j} k(x_j, x_i) = Σ_j k_ij (x_i - x_j) / h²: away from the others.
    repulsion = (kernel.sum(axis=1, keepdims=True) * x - kernel @ x) / bandwidth
    return (kernel @ scores.astype(np.float64) + repulsion) / len(x)


def _array(vector: Array | Tensor) -> Array:
    return vector.cpu().numpy() if isinstance(vector, Tensor) else vector


def _squared_distances(x: Array) -> Array:
    gaps = x[:, None, :].astype(np.float64) - x[None, :, :]
    return np.square(gaps).sum(axis=-1)


class SVPGLearner(ActorCriticLearner):
    """Learner for SVPG. Every stored parameter has a leading axis over the n particles."""

    def __init__(self, svpg: SVPG, setup: Setup) -> None:
        super().__init__(svpg.particle.model_copy(update={"kernel": svpg.kernel}), setup)
        self.svpg = svpg

    def initialize(self, *, run_seed: int) -> LearnerState:
        return self._counted(self._all_fresh(run_seed, 0), 0, None)

    def at_start(self, state: LearnerState, *, run_seed: int) -> LearnerState:
        # Not in the update, so that stored and exported particles are always trained.
        num_updates = int(state.extra[NUM_UPDATES])
        if self.svpg.horizon is None or num_updates == 0 or num_updates % self.svpg.horizon:
            return state
        fresh = self._all_fresh(run_seed, num_updates)
        return replace(fresh, extra=state.extra | fresh.extra)

    def acting_params(self, state: LearnerState, num_tasks: int) -> TaskParams:
        """Return the parameters of particle b mod n for each task b."""
        particles = np.arange(num_tasks) % self.svpg.num_particles
        return TaskParams({name: value[particles] for name, value in state.params.items()})

    def experiences(self, episodes: EpisodeBatch) -> list[Experience]:
        return [Experience(episodes, slice(j, j + 1)) for j in range(self.svpg.num_particles)]

    def split(self, state: LearnerState) -> list[LearnerState]:
        """Return the state of each particle, without the counters, which all particles share."""
        n, parts = self.svpg.num_particles, (state.params, state.optimizer, state.extra)

        def of(arrays: Params, j: int) -> Params:
            return {name: value[j] for name, value in arrays.items() if value.shape[:1] == (n,)}

        return [LearnerState(*(of(arrays, j) for arrays in parts)) for j in range(n)]

    def joined(self, states: Sequence[LearnerState]) -> LearnerState:
        def stacked(parts: Sequence[Params]) -> Params:
            return {name: np.stack([part[name] for part in parts]) for name in parts[0]}

        parts = [(state.params, state.optimizer, state.extra) for state in states]
        return LearnerState(*map(stacked, zip(*parts, strict=True)))

    def directions(self, steps: Sequence[ActorCriticSteps], num_updates: int) -> tuple[Sequence[Array | None], Metrics]:
        """Return each particle's Stein direction, negated because optimizers descend, and metrics."""
        temperature = self.svpg.temperature * self.svpg.temperature_decay**num_updates
        x = np.stack([_array(of.policy_params.vector) for of in steps])
        scores = np.stack([_array(of.policy_params.gradient) for of in steps]).astype(np.float64) / -temperature
        if self.svpg.prior_std is not None:
            scores -= x / self.svpg.prior_std**2
        bandwidth = median_bandwidth(x)
        upward = stein_direction(x, scores, bandwidth) * steps[0].learned
        metrics = {"temperature": temperature, "kernel_bandwidth": bandwidth}
        return list((-upward).astype(x.dtype)), metrics

    def called(self, j: int) -> str:
        return f" of particle {j}"

    def _all_fresh(self, run_seed: int, num_updates: int) -> LearnerState:
        particles = range(self.svpg.num_particles)
        return self.joined([self.fresh(generator(run_seed, "initialize", j, num_updates)) for j in particles])

"""The loop that A2C, PPO, PPO2 and SVPG share: epochs of minibatches over an iteration's complete episodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from metaloom.pipeline.algorithms.actor_critic.gradient_steps import ActorCriticSteps
from metaloom.pipeline.algorithms.actor_critic.settings import ActorCriticSettings, CriticFit
from metaloom.pipeline.estimation.config import ProcessingConfig
from metaloom.pipeline.estimation.experience import CriticEstimate, Experience, Rows
from metaloom.pipeline.estimation.processing import scale
from metaloom.pipeline.estimation.returns import EPSILON, shift_positive
from metaloom.pipeline.seeding import generator
from metaloom.pipeline.types import Array, LearnerState, Metrics, Params, Samples

RUNNING = "advantage_moments"
"""Name in the learner of the running count, mean and sum of squared deviations, [3] float64."""


@dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared deviations of the values so far (Welford; merged after Chan et al. 1979)."""

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0

    def merged(self, values: Array) -> Moments:
        """Return the moments with more values included."""
        count, mean = len(values), float(values.mean())
        total, gap = self.count + count, mean - self.mean
        squares = float(np.square(values - mean).sum())
        return Moments(
            total, self.mean + gap * count / total, self.squares + squares + gap**2 * self.count * count / total
        )

    @property
    def std(self) -> float:
        """Standard deviation of all values."""
        return float(np.sqrt(self.squares / self.count))

    def stored(self) -> Params:
        """Return the moments as arrays of a learner."""
        return {RUNNING: np.array([self.count, self.mean, self.squares])}

    @classmethod
    def of(cls, learner: LearnerState) -> Moments | None:
        """Return the moments that a learner keeps; None if it keeps none."""
        return cls(*learner.extra[RUNNING].tolist()) if RUNNING in learner.extra else None


def scaled(advantages: Array, mask: Array, processing: ProcessingConfig, running: Moments | None) -> Array:
    """Return advantages [b, E, T] scaled as `processing` says: by task, or by running moments that include them."""
    if running is None:
        return np.stack([scale(task, real, processing) for task, real in zip(advantages, mask, strict=True)])
    if processing.normalize_advantages:
        advantages = (advantages - running.mean) / (running.std + EPSILON) * mask
    if processing.positive_advantages:
        advantages = np.stack([shift_positive(*task) for task in zip(advantages, mask, strict=True)])
    return advantages


POLICY_PASS, CRITIC_PASS = 0, 1
"""Last number of the position from which the order of minibatches is drawn."""

Directions = Callable[[Sequence[ActorCriticSteps]], tuple[Sequence[Array | None], Metrics]]
"""Once all policies have their gradients: what each one's optimizer descends, [D] or None for its gradient, and what
describes it."""


class EpochsUpdate:
    """An iteration's update in progress, of one or several policies with their critics.

    Args:
        settings: Settings of the algorithm.
        processing: Discount, λ, and how advantages are scaled.
        steps: Gradient steps of each policy with its critic.
        experiences: Experience of each policy.
        mask: [B, E, T] of all episodes, 1 where a step is real.
        moments: Running moments of advantages before these episodes, where the state has some.
        lr_factor: Factor on all step sizes.
        position: Run seed and iteration.
    """

    def __init__(
        self,
        settings: ActorCriticSettings,
        processing: ProcessingConfig,
        steps: Sequence[ActorCriticSteps],
        experiences: Sequence[Experience],
        mask: Array,
        *,
        moments: Moments | None,
        lr_factor: float,
        position: tuple[int, int],
    ) -> None:
        self._settings, self._processing, self._steps, self._experiences = settings, processing, steps, experiences
        self._mask, self._before, self._lr_factor, self._position = mask, moments, lr_factor, position
        self._raw = np.zeros(0)
        self._rows: list[Rows] = []

    def take_samples(self, samples: Samples) -> None:
        """Learn from the stored values and advantages."""
        estimates = self._estimates()
        values, advantages = self._split(samples.values), self._split(samples.advantages)
        self._rows = [
            Rows(e.observations, e.actions, of.old_log_prob(e), e.rows(a), e.rows(v), e.rows(estimate.targets))
            for of, e, a, v, estimate in zip(self._steps, self._experiences, advantages, values, estimates, strict=True)
        ]

    def fit_critics(self, fit: CriticFit) -> None:
        """Run the critics' own epochs."""
        for j, (of, rows) in enumerate(zip(self._steps, self._rows, strict=True)):
            num_parts = -(-len(rows) // fit.batch_size)
            for epoch in range(fit.num_epochs):
                shuffled = self._shuffled(rows, epoch, j, CRITIC_PASS)
                for n in range(num_parts):
                    of.critic_gradient(shuffled[_share(len(rows), num_parts, n)], 1.0, fit.max_grad_norm)
                    of.step_critic(fit.learning_rate * self._lr_factor)

    def reestimate(self) -> None:
        """Recompute the advantages with the current critics."""
        self._estimates()
        advantages = self._split(scaled(self._raw, self._mask, self._processing, self.moments))
        self._rows = [
            replace(rows, advantages=e.rows(a))
            for rows, e, a in zip(self._rows, self._experiences, advantages, strict=True)
        ]

    def train(self, directions: Directions) -> Metrics:
        """Run the policies' epochs. Critics without separate epochs learn in them too."""
        rate = self._settings.learning_rate * self._lr_factor
        critic_weight = self._settings.critic_weight if self._settings.critic_fit is None else None
        norms: list[float] = []
        described: Metrics = {}
        # A minibatch of every policy, as many times as the largest needs.
        sizes = [len(rows) for rows in self._rows]
        num_parts = min(-(-max(sizes) // self._settings.batch_size), *sizes)
        for epoch in range(self._settings.num_epochs):
            shuffled = [self._shuffled(rows, epoch, j, POLICY_PASS) for j, rows in enumerate(self._rows)]
            for n in range(num_parts):
                parts = [rows[_share(len(rows), num_parts, n)] for rows in shuffled]
                lengths = [of.policy_gradient(part, critic_weight) for of, part in zip(self._steps, parts, strict=True)]
                moves, described = directions(self._steps)
                for of, move in zip(self._steps, moves, strict=True):
                    if critic_weight is not None:
                        of.step_critic(rate)
                    of.step_policy(rate, move)
                # Read only now, so that nothing waits for the device before all work is queued.
                norms += [float(length) for length in lengths]
        return {"gradient_norm": float(np.mean(norms)), "learning_rate": rate, **described}

    def describe(self) -> Metrics:
        """Return the losses, KL, entropy and how well values explain the targets: means over policies."""
        parts = zip(self._steps, self._rows, self._experiences, strict=True)
        each = [of.describe(rows, experience.behavior) for of, rows, experience in parts]
        return {name: float(np.mean([one[name] for one in each])) for name in each[0]}

    @property
    def moments(self) -> Moments | None:
        """Running moments including these episodes' advantages, if any are kept."""
        return None if self._before is None else self._before.merged(self._raw[self._mask != 0])

    def _shuffled(self, rows: Rows, epoch: int, j: int, which: int) -> Rows:
        run_seed, iteration = self._position
        return rows[generator(run_seed, "minibatches", iteration, epoch, j, which).permutation(len(rows))]

    def _estimates(self) -> list[CriticEstimate]:
        pairs = zip(self._experiences, self._steps, strict=True)
        estimates = [estimated(e, of, self._settings, self._processing) for e, of in pairs]
        self._raw = np.concatenate([estimate.advantages for estimate in estimates])
        return estimates

    def _split(self, values: Array) -> list[Array]:
        """Split values [B, E, T] by policy."""
        return np.split(values, len(self._steps)) if len(self._steps) > 1 else [values]


def estimated(
    experience: Experience, steps: ActorCriticSteps, settings: ActorCriticSettings, processing: ProcessingConfig
) -> CriticEstimate:
    """Estimate some episodes with the current critic."""
    return experience.estimate(steps.values, processing.discount, processing.gae_lambda, settings.value_target)


def _share(num_rows: int, num_parts: int, n: int) -> slice:
    return slice(num_rows * n // num_parts, num_rows * (n + 1) // num_parts)

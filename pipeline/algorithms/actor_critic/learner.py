"""The loop that A2C, PPO, PPO2 and SVPG share: epochs of minibatches over an iteration's complete episodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from metaloom.pipeline.algorithms.actor_critic.experience import Estimate, Experience
from metaloom.pipeline.algorithms.actor_critic.particle import Minibatch, Particle, Policy, critic_of, initial_learner
from metaloom.pipeline.algorithms.actor_critic.scaling import Moments, scaled
from metaloom.pipeline.algorithms.actor_critic.settings import ActorCritic
from metaloom.pipeline.algorithms.finite_checks import NumericalError
from metaloom.pipeline.algorithms.maml.gradient_based import NUM_UPDATES
from metaloom.pipeline.estimation.config import ProcessingConfig
from metaloom.pipeline.estimation.returns import discounted_returns
from metaloom.pipeline.seeding import generator
from metaloom.pipeline.types import Array, EpisodeBatch, LearnerState, Metrics, ParallelMap, Samples, Step, TaskParams

POLICY_PASS, CRITIC_PASS = 0, 1
"""Last number of the position from which the order of minibatches is drawn."""


@dataclass(frozen=True)
class ActorCriticLearner:
    """An actor-critic as the stages use it.

    Attributes:
        settings: the algorithm's.
        processing: discount, λ, and how advantages are scaled.
    """

    settings: ActorCritic
    processing: ProcessingConfig

    @property
    def inner_steps(self) -> int:
        """None: nothing adapts."""
        return 0

    def initialize(self, policy: Policy, *, run_seed: int) -> LearnerState:
        """The learner before the first iteration."""
        learner = initial_learner(self.settings, policy, generator(run_seed, "initialize"))
        return self.with_counters(learner)

    def with_counters(self, learner: LearnerState) -> LearnerState:
        """A learner that has made no updates."""
        learner.extra[NUM_UPDATES] = np.zeros((), np.int64)
        if self.settings.advantage_scaling == "running":
            learner.extra.update(Moments().stored())
        return learner

    def acting_params(self, learner: LearnerState, num_tasks: int) -> TaskParams:
        """What every task acts with: one policy for all."""
        return TaskParams.broadcast(learner.params, num_tasks)

    def adapt(
        self, policy: Policy, learner: LearnerState, params: TaskParams, step: Step, *, parallel: ParallelMap = map
    ) -> TaskParams:
        """Refuse: nothing here adapts to a task."""
        del policy, learner, params, parallel
        raise ValueError(f"adapt: found samples of round {step.k}; an actor-critic has no inner steps")

    def estimate(self, learner: LearnerState, episodes: EpisodeBatch) -> Samples:
        """Returns, values and advantages by the critic as it is before it learns from these episodes."""
        mask = episodes.mask
        parts = zip(self.experiences(episodes), self.split(learner), strict=True)
        estimates = [self.by_critic(e, critic_of(self.settings, part).forward) for e, part in parts]
        raw = _raw_advantages(estimates)
        return Samples(
            returns=discounted_returns(episodes.rewards * mask, self.processing.discount).astype(np.float32),
            values=np.concatenate([estimate.values for estimate in estimates]).astype(np.float32),
            advantages=scaled(raw, mask, self.processing, _moments(learner, raw[mask != 0])).astype(np.float32),
            mask=mask,
        )

    def optimize(
        self,
        policy: Policy,
        learner: LearnerState,
        steps: Sequence[Step],
        *,
        run_seed: int,
        iteration: int,
        parallel: ParallelMap = map,
    ) -> tuple[LearnerState, Metrics]:
        """The learner of the next iteration; see Algorithm."""
        del parallel
        (step,) = steps
        update = _Update(
            self, learner, step.episodes, [Particle(self.settings, policy, p) for p in self.split(learner)]
        )
        update.take_samples(step.samples)
        before = update.describe()
        if self.settings.critic_fit is not None:
            update.fit_critics((run_seed, iteration))
            update.reestimate()
        described = update.train((run_seed, iteration))
        after = update.describe()
        _require_finite(update.particles)
        metrics = {
            "loss_before": before.pop("loss"),
            "loss_after": after.pop("loss"),
            "value_loss_before": before["value_loss"],
            "value_loss_after": after.pop("value_loss"),
            "entropy_after": after.pop("entropy"),
            **after,
            **described,
        }
        return update.learner(), metrics

    def split(self, learner: LearnerState) -> list[LearnerState]:
        """The learner of every particle: one learns from all tasks together."""
        return [learner]

    def joined(self, learners: Sequence[LearnerState]) -> LearnerState:
        """One learner of all particles."""
        (learner,) = learners
        return learner

    def experiences(self, episodes: EpisodeBatch) -> list[Experience]:
        """What every particle learns from."""
        return [Experience(episodes, slice(None))]

    def directions(self, particles: Sequence[Particle], num_updates: int) -> tuple[list[Array], Metrics]:
        """What each policy's optimizer descends, [D] each, after its gradient was computed; and what describes it."""
        del num_updates
        return [particle.policy.gradient for particle in particles], {}

    def begun(self, policy: Policy, learner: LearnerState, *, run_seed: int) -> LearnerState:
        """The learner as an iteration acts and learns with it, from that which is stored before."""
        del policy, run_seed
        return learner

    def by_critic(self, experience: Experience, critic: Callable[[Array], Array]) -> Estimate:
        """What a critic, [n, O] -> [n, 1], makes of some episodes."""
        processing = self.processing
        return experience.estimate(critic, processing.discount, processing.gae_lambda, self.settings.value_target)


class _Update:
    """An iteration's update while it is under way."""

    def __init__(
        self, algorithm: ActorCriticLearner, learner: LearnerState, episodes: EpisodeBatch, particles: list[Particle]
    ) -> None:
        self._algorithm, self._settings, self._before = algorithm, algorithm.settings, learner
        self._num_updates = int(learner.extra[NUM_UPDATES])
        self._lr_factor = self._settings.lr_factor(self._num_updates)
        self._experiences = algorithm.experiences(episodes)
        self._mask = episodes.mask
        self.particles = particles
        self._batches: list[Minibatch] = []
        self._raw = np.zeros(0)

    def take_samples(self, samples: Samples) -> None:
        """Learn from the stored values and advantages."""
        estimates = self._estimates()
        self._raw = _raw_advantages(estimates)
        values, advantages = self._split(samples.values), self._split(samples.advantages)
        self._batches = [
            Minibatch(e.observations, e.actions, e.log_prob, e.rows(a), e.rows(v), e.rows(estimate.targets))
            for e, a, v, estimate in zip(self._experiences, advantages, values, estimates, strict=True)
        ]

    def fit_critics(self, position: tuple[int, int]) -> None:
        """The critics' own epochs."""
        fit = self._settings.critic_fit
        assert fit is not None
        for j, (particle, batch) in enumerate(zip(self.particles, self._batches, strict=True)):
            num_parts = -(-len(batch) // fit.batch_size)
            for epoch in range(fit.num_epochs):
                shuffled = _shuffled(batch, position, epoch, j, CRITIC_PASS)
                for n in range(num_parts):
                    particle.critic_gradient(shuffled.part(_share(len(batch), num_parts, n)), 1.0, fit.max_grad_norm)
                    particle.step_critic(fit.learning_rate * self._lr_factor)

    def reestimate(self) -> None:
        """Advantages by the critics as they are now."""
        self._raw = _raw_advantages(self._estimates())
        running = _moments(self._before, self._raw[self._mask != 0])
        advantages = self._split(scaled(self._raw, self._mask, self._algorithm.processing, running))
        self._batches = [
            replace(batch, advantages=e.rows(a))
            for batch, e, a in zip(self._batches, self._experiences, advantages, strict=True)
        ]

    def train(self, position: tuple[int, int]) -> Metrics:
        """The policies' epochs, in which critics that do not learn by themselves take part."""
        rate = self._settings.learning_rate * self._lr_factor
        norms: list[float] = []
        described: Metrics = {}
        for parts in self._minibatches(position):
            norms += [p.policy_gradient(part)[1] for p, part in zip(self.particles, parts, strict=True)]
            directions, described = self._algorithm.directions(self.particles, self._num_updates)
            for particle, part, direction in zip(self.particles, parts, directions, strict=True):
                if self._settings.critic_fit is None:
                    particle.critic_gradient(part, self._settings.critic_weight)
                    particle.step_critic(rate)
                particle.step_policy(direction, rate)
        return {"gradient_norm": float(np.mean(norms)), "learning_rate": rate, **described}

    def describe(self) -> Metrics:
        """Losses, KL, entropy and how well values explain the targets: means over particles."""
        parts = zip(self.particles, self._batches, self._experiences, strict=True)
        each = [particle.describe(batch, experience) for particle, batch, experience in parts]
        return {name: float(np.mean([one[name] for one in each])) for name in each[0]}

    def learner(self) -> LearnerState:
        """The learner after the update."""
        updated = self._algorithm.joined([particle.learner() for particle in self.particles])
        extra = self._before.extra | updated.extra | {NUM_UPDATES: np.array(self._num_updates + 1, np.int64)}
        moments = _moments(self._before, self._raw[self._mask != 0])
        return LearnerState(updated.params, updated.optimizer, extra | (moments.stored() if moments else {}))

    def _minibatches(self, position: tuple[int, int]) -> Iterator[list[Minibatch]]:
        """Of every particle one, as many times as the largest needs."""
        sizes = [len(batch) for batch in self._batches]
        num_parts = min(-(-max(sizes) // self._settings.batch_size), *sizes)
        for epoch in range(self._settings.num_epochs):
            shuffled = [_shuffled(batch, position, epoch, j, POLICY_PASS) for j, batch in enumerate(self._batches)]
            for n in range(num_parts):
                yield [batch.part(_share(len(batch), num_parts, n)) for batch in shuffled]

    def _estimates(self) -> list[Estimate]:
        pairs = zip(self._experiences, self.particles, strict=True)
        return [self._algorithm.by_critic(e, particle.value_function.forward) for e, particle in pairs]

    def _split(self, values: Array) -> list[Array]:
        """[B, E, T] by particle."""
        return np.split(values, len(self.particles)) if len(self.particles) > 1 else [values]


def _raw_advantages(estimates: Sequence[Estimate]) -> Array:
    return np.concatenate([estimate.advantages for estimate in estimates])


def _shuffled(batch: Minibatch, position: tuple[int, int], epoch: int, particle: int, which: int) -> Minibatch:
    run_seed, iteration = position
    rng = generator(run_seed, "minibatches", iteration, epoch, particle, which)
    return batch.shuffled(rng.permutation(len(batch)))


def _share(num_rows: int, num_parts: int, n: int) -> slice:
    return slice(num_rows * n // num_parts, num_rows * (n + 1) // num_parts)


def _moments(learner: LearnerState, advantages: Array) -> Moments | None:
    """The running moments with these advantages [N], where the learner keeps some."""
    before = Moments.of(learner)
    return None if before is None else before.merged(advantages)


def _require_finite(particles: Sequence[Particle]) -> None:
    for j, particle in enumerate(particles):
        for name, params in (("policy", particle.policy), ("critic", particle.critic)):
            if not np.isfinite(params.vector).all():
                raise NumericalError(
                    f"meta_optimize: parameters of the {name} of particle {j} are not finite after the update; "
                    "required finite numbers. Lower algorithm.learning_rate or set algorithm.max_grad_norm"
                )

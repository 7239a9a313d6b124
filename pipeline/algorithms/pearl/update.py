"""The gradient steps of an iteration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from metaloom.pipeline.algorithms.finite_checks import NumericalError
from metaloom.pipeline.algorithms.off_policy.progress import num_updates
from metaloom.pipeline.algorithms.pearl.part import Noise, Part
from metaloom.pipeline.algorithms.pearl.settings import PEARL
from metaloom.pipeline.algorithms.pearl.state import TrainedName, learner_of, networks_of, optimizers_of
from metaloom.pipeline.types import LearnerState, Metrics, Minibatch, ParallelMap

MAX_PARTS = 4
"""Parts of equal size that a gradient step's tasks are dealt into. Fixed: the order of sums depends on it."""
BY_TASK = ("kl", "latent_std")
METRICS = ("q_loss", "value_loss", "policy_loss", *BY_TASK, "entropy", "q_target")


class GradientSteps:
    """Working copies of a learner's networks and optimizers while gradient steps change them."""

    def __init__(self, settings: PEARL, discount: float, learner: LearnerState) -> None:
        self._settings, self._discount = settings, discount
        self.networks, self._optimizers = networks_of(learner), optimizers_of(learner)
        self._num_updates = num_updates(learner)
        self._parts: list[Part] = []
        self._shape: tuple[int, ...] = ()
        self._learning_rates: dict[TrainedName, float] = {
            "policy": settings.policy_learning_rate,
            "encoder": settings.encoder_learning_rate,
            "q1": settings.q_learning_rate,
            "q2": settings.q_learning_rate,
            "v": settings.v_learning_rate,
        }

    def step(self, minibatch: Minibatch, rng: np.random.Generator, parallel: ParallelMap) -> Metrics:
        """Make one gradient step; returns means over its transitions, and of kl and latent_std over its tasks.

        The latent variables are drawn once, and everything in the step is given them. Encoder and Q functions learn
        first, then V and policy by the Q functions as they have become, last the target V.
        """
        self._prepare(minibatch)
        noise = self._draw(minibatch, rng)
        sums = self._over_parts(lambda part: part.critic_gradients(minibatch, noise), parallel)
        self._descend(("q1", "q2", "encoder"), parallel)
        sums |= self._over_parts(lambda part: part.actor_gradients(minibatch, noise), parallel)
        self._descend(("v", "policy"), parallel)
        self._move_target()
        K, N, _ = self._shape
        return {name: value / (K if name in BY_TASK else K * N) for name, value in sums.items()}

    def learner(self) -> LearnerState:
        """The learner of the next iteration, after the steps so far.

        Raises:
            NumericalError: if a parameter is not finite.
        """
        for name, network in self.networks.items():
            if not np.isfinite(network.vector).all():
                raise NumericalError(
                    f"update: parameters of {name} are not finite after the gradient steps; required finite "
                    "numbers. Lower algorithm.reward_scale or the learning rates of algorithm"
                )
        return learner_of(self.networks, self._optimizers, num_updates=self._num_updates + 1)

    def _prepare(self, minibatch: Minibatch) -> None:
        if minibatch.context is None:
            raise ValueError("update: a minibatch has no context; PEARL requires one to infer its tasks from")
        shape = (*minibatch.transitions.rewards.shape, minibatch.context.rewards.shape[1])
        if not self._parts:
            self._shape, num_parts = shape, min(MAX_PARTS, shape[0])
            bounds = [shape[0] * i // num_parts for i in range(num_parts + 1)]
            self._parts = [
                Part(self._settings, self._discount, self.networks, minibatch, slice(start, stop))
                for start, stop in pairwise(bounds)
            ]
        if shape != self._shape:
            raise ValueError(
                f"update: a minibatch has [K, N, C] = {list(shape)} after one of {list(self._shape)}; required that "
                "all minibatches of an iteration are of one shape"
            )

    def _draw(self, minibatch: Minibatch, rng: np.random.Generator) -> Noise:
        K, _, _ = self._shape
        latent = rng.standard_normal((K, self._settings.latent_size), np.float32)
        return Noise(latent, rng.standard_normal(minibatch.transitions.actions.shape, np.float32))

    def _over_parts(self, gradients: Callable[[Part], Metrics], parallel: ParallelMap) -> Metrics:
        by_part = list(parallel(gradients, self._parts))
        return {name: sum(part[name] for part in by_part) for name in by_part[0]}

    def _descend(self, names: Sequence[TrainedName], parallel: ParallelMap) -> None:
        for _ in parallel(self._descend_one, names):
            pass

    def _descend_one(self, name: TrainedName) -> None:
        network = self.networks[name]
        np.copyto(network.gradient, self._parts[0].gradients[name])
        for part in self._parts[1:]:
            network.gradient += part.gradients[name]
        self._optimizers[name].step(network.vector, network.gradient, self._learning_rates[name])

    def _move_target(self) -> None:
        tau, target = self._settings.soft_target_tau, self.networks["target_v"].vector
        target *= 1 - tau
        target += tau * self.networks["v"].vector

"""PEARL as the stages use it: what to act with, what to believe of a task, and how to learn."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from metaloom.pipeline.algorithms.off_policy.progress import means
from metaloom.pipeline.algorithms.pearl.networks import Activations
from metaloom.pipeline.algorithms.pearl.part import context_features
from metaloom.pipeline.algorithms.pearl.posterior import Belief, posterior_for
from metaloom.pipeline.algorithms.pearl.settings import PEARL
from metaloom.pipeline.algorithms.pearl.state import PARAMS, initial_learner, networks_of
from metaloom.pipeline.algorithms.pearl.update import METRICS, GradientSteps
from metaloom.pipeline.policies.actors.belief import BELIEF_MEAN, BELIEF_VARIANCE
from metaloom.pipeline.seeding import generator
from metaloom.pipeline.types import LearnerState, Metrics, Minibatch, ParallelMap, TaskParams, Transitions

if TYPE_CHECKING:
    from metaloom.pipeline.policies.off_policy import OffPolicyPolicy


@dataclass(frozen=True)
class PEARLLearner:
    """Inference of tasks, and soft actor-critic given what was inferred.

    Attributes:
        settings: of the algorithm.
        discount: per step.
    """

    settings: PEARL
    discount: float

    @property
    def inner_steps(self) -> int:
        """Times an evaluation infers the task, unless it is told otherwise."""
        return self.settings.inner_steps

    def initialize(self, policy: OffPolicyPolicy, *, run_seed: int) -> LearnerState:
        """The learner before the first iteration.

        Raises:
            ValueError: where actions are choices.
        """
        if policy.num_choices:
            raise ValueError(
                f"initialize: the environment has {policy.num_choices} choices of action; PEARL requires actions that "
                "are numbers. Choose an environment with a box of actions"
            )
        sizes = policy.config.hidden_sizes, policy.observation_size, policy.action_size
        return initial_learner(self.settings, *sizes, generator(run_seed, "initialize"))

    def acting_params(self, learner: LearnerState, num_tasks: int) -> TaskParams:
        """What tasks of which nothing is known act with: the policy, and the prior as their belief."""
        prefix = PARAMS["policy"]
        policy = {name: value for name, value in learner.params.items() if name.startswith(f"{prefix}.")}
        shared = TaskParams.broadcast(policy, num_tasks).params
        return TaskParams({**shared, **self.prior(learner, num_tasks).params})

    def prior(self, learner: LearnerState, num_tasks: int) -> TaskParams:
        """N(0, I) over the latent variables of every task; without the bottleneck the point 0."""
        del learner
        mean = np.zeros((num_tasks, self.settings.latent_size), np.float32)
        variance = np.ones_like(mean) if self.settings.use_information_bottleneck else np.zeros_like(mean)
        return _params_of(Belief(mean, variance))

    def infer(self, learner: LearnerState, context: Transitions) -> TaskParams:
        """The belief about every task given its context [B, C]: belief.mean and belief.variance, [B, Z]."""
        encoder = networks_of(learner)["encoder"]
        activations = Activations(encoder.sizes, context.rewards.shape[1], encoder.vector.dtype)
        posterior = posterior_for(self.settings.use_information_bottleneck)
        beliefs: list[Belief] = []
        # Task by task: the bits of one must not depend on how many others there are.
        for b in range(len(context.rewards)):
            features = context_features(context, slice(b, b + 1), with_next=self.settings.use_next_obs_in_context)
            np.concatenate(features, axis=-1, out=activations.inputs)
            beliefs.append(posterior.infer(activations.forward(encoder.layers)[None]))
        mean, variance = (np.concatenate([getattr(b, name) for b in beliefs]) for name in ("mean", "variance"))
        return _params_of(Belief(mean, variance))

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
        """The learner of the next iteration after one gradient step per minibatch, and means over the steps.

        Args:
            policy: the policy, whose sizes are those of the learner's networks.
            learner: of this iteration; its arrays are left as they are.
            minibatches: of one shape, with a context.
            run_seed: of the run.
            iteration: of the run.
            parallel: the built-in map or that of a pool of threads, which changes nothing but the time.
        """
        del policy
        steps = GradientSteps(self.settings, self.discount, learner)
        rng = generator(run_seed, "updates", iteration)
        metrics = means(METRICS, (steps.step(minibatch, rng, parallel) for minibatch in minibatches))
        return steps.learner(), metrics


def _params_of(belief: Belief) -> TaskParams:
    return TaskParams({BELIEF_MEAN: belief.mean, BELIEF_VARIANCE: belief.variance})

"""Deep Q-learning as the stages use it: what a run's learner holds, by a kernel or by the definition."""

from __future__ import annotations

import numpy as np

from metaloom.pipeline.algorithms.contract import Setup
from metaloom.pipeline.algorithms.kernel_choice import fused
from metaloom.pipeline.algorithms.off_policy.dql_definition import METRICS, TARGET, DQLDefinition, Q
from metaloom.pipeline.algorithms.off_policy.gradient_steps import Counters, GradientSteps
from metaloom.pipeline.algorithms.off_policy.learner import OffPolicyLearner
from metaloom.pipeline.algorithms.off_policy.settings import DQL
from metaloom.pipeline.nn.flat_networks import prefixed, unprefixed
from metaloom.pipeline.nn.networks import build_network
from metaloom.pipeline.nn.schedules import lr_factor
from metaloom.pipeline.nn.torch_optimizers import initial_state
from metaloom.pipeline.policies.actors.off_policy import EPSILON, Q_NETWORK
from metaloom.pipeline.seeding import generator
from metaloom.pipeline.types import LearnerState, Metrics, Minibatch, ParallelMap, Params, TaskParams


class DQLLearner(OffPolicyLearner[object, None]):
    """DQL for one run; see Learner.

    Attributes:
        settings: of the algorithm.
        network: from observations to the values of all actions.
    """

    metrics = METRICS

    def __init__(self, settings: DQL, setup: Setup) -> None:
        super().__init__(settings.name, setup, discrete=True)
        self.settings, self._lr_factor = settings, lr_factor(settings, settings.learning_rate)
        spec = setup.policy.network_spec(setup, setup.num_actions, activation="relu")
        self.network = build_network(Q_NETWORK, spec)
        self.kernel = self.choose_kernel(settings.kernel, settings.optimizer, self.network)

    def initialize(self, *, run_seed: int) -> LearnerState:
        """Return a Q-function, and a target network that equals it; see Learner."""
        params = self.network.initialize(generator(run_seed, "initialize"))
        targets = {name: value.copy() for name, value in unprefixed(params, Q_NETWORK).items()}
        optimizer = prefixed(initial_state(self.settings.optimizer, params), Q)
        return LearnerState(params, optimizer, prefixed(targets, TARGET) | Counters(0, 0).arrays())

    def acting_params(self, state: LearnerState, num_tasks: int) -> TaskParams:
        """The Q-function, and `epsilon` [B] of the coming iteration; see Learner."""
        return _acting_with(self._epsilon(state), state, num_tasks)

    def filling_params(self, state: LearnerState, num_tasks: int) -> TaskParams:
        """The Q-function with the `epsilon` of the end of training; see OffPolicyLearner."""
        return _acting_with(self.settings.eps_final, state, num_tasks)

    def gradient_steps(self, state: LearnerState, *, parallel: ParallelMap = map) -> GradientSteps[None]:
        """See OffPolicyLearner; a single small network has nothing to share out."""
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

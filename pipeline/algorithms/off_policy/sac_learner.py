"""Soft actor-critic as the stages use it: what a run's learner holds, by a kernel or by the definition."""

from __future__ import annotations

import numpy as np

from metaloom.pipeline.algorithms.contract import Setup
from metaloom.pipeline.algorithms.kernel_choice import fused
from metaloom.pipeline.algorithms.off_policy.gradient_steps import Counters, GradientSteps
from metaloom.pipeline.algorithms.off_policy.learner import OffPolicyLearner
from metaloom.pipeline.algorithms.off_policy.sac_definition import METRICS, SACDefinition
from metaloom.pipeline.algorithms.off_policy.sac_state import TRAINED, TWINS, SACArrays
from metaloom.pipeline.algorithms.off_policy.settings import SAC
from metaloom.pipeline.nn.networks import build_network
from metaloom.pipeline.nn.schedules import lr_factor
from metaloom.pipeline.nn.torch_optimizers import initial_state
from metaloom.pipeline.policies.actors.off_policy import POLICY_NETWORK
from metaloom.pipeline.seeding import generator
from metaloom.pipeline.types import Array, LearnerState, Metrics, Minibatch, ParallelMap, Params


class SACLearner(OffPolicyLearner[object, Array]):
    """SAC for one run; see Learner.

    Attributes:
        settings: of the algorithm.
        policy: its network, from observations to means and log standard deviations.
        q: the network of the first Q-function, which the second is like.
    """

    metrics = METRICS

    def __init__(self, settings: SAC, setup: Setup) -> None:
        super().__init__(settings.name, setup, discrete=False)
        self.settings, self._lr_factor = settings, lr_factor(settings, settings.learning_rate)
        policy = setup.policy.network_spec(setup, 2 * setup.action_size, activation="relu")
        critic = setup.policy.critic(settings.critic_hidden_sizes)
        q = critic.network_spec(setup, 1, extra_size=setup.action_size, activation="relu")
        self.policy, self.q = build_network(POLICY_NETWORK, policy), build_network(TWINS[0], q)
        self.kernel = self.choose_kernel(settings.kernel, settings.optimizer, self.policy, self.q)

    def initialize(self, *, run_seed: int) -> LearnerState:
        """Return two Q-functions that differ, and targets equal to them; see Learner."""
        rng = generator(run_seed, "initialize")
        policy = self.policy.initialize(rng)
        first, second = (self.q.initialize(rng) for _ in TWINS)
        q = first | {f"{TWINS[1]}{name.removeprefix(TWINS[0])}": value for name, value in second.items()}
        log_alpha = np.array(np.log(self.settings.ent_coeff_init), np.float32)
        trained = {"policy": policy, "q": q, "alpha": {"log_alpha": log_alpha}}
        optimizers = {name: initial_state(self.settings.optimizer, trained[name]) for name in TRAINED}
        targets = {name: value.copy() for name, value in q.items()}
        return SACArrays(policy, q, targets, log_alpha, optimizers).state(Counters(0, 0))

    def gradient_steps(self, state: LearnerState, *, parallel: ParallelMap = map) -> GradientSteps[Array]:
        of = (self.settings, self.policy, self.q, state)
        discount, rate = self._setup.processing.discount, self._learning_rate(state)
        if self.kernel.name == "fused":
            return fused(SACDefinition)(*of, discount=discount, learning_rate=rate, parallel=parallel)
        return SACDefinition(*of, discount=discount, learning_rate=rate, device=self._device)

    def noise(self, minibatch: Minibatch, rng: np.random.Generator) -> Array:
        """Draw [2n, A]; see SACDefinition.step."""
        return rng.standard_normal((2 * minibatch.transitions.rewards.size, self._setup.action_size), np.float32)

    def networks_of(self, state: LearnerState) -> dict[str, Params]:
        arrays = SACArrays.of(state)
        return {"the policy": arrays.policy, "the Q-functions": arrays.q}

    def described(self, state: LearnerState) -> Metrics:
        return {"learning_rate": self._learning_rate(state)}

    def _learning_rate(self, state: LearnerState) -> float:
        return self.settings.learning_rate * self._lr_factor(Counters.of(state).updates)

"""The learner of recurrent policies, with a critic on their memory, trained on whole trials."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from metaloom.pipeline.algorithms.contract import NUM_UPDATES, Kernel, Setup
from metaloom.pipeline.algorithms.trials.learner import CRITIC_SCALE, UNSCALED, TrialLearner
from metaloom.pipeline.algorithms.trials.losses import Sequences
from metaloom.pipeline.algorithms.trials.settings import MemorySettings, TrialSteps
from metaloom.pipeline.estimation.trials import Trials
from metaloom.pipeline.nn.distributions import Distribution
from metaloom.pipeline.nn.torch_optimizers import initial_state
from metaloom.pipeline.policies.build import RecurrentPolicy
from metaloom.pipeline.seeding import generator
from metaloom.pipeline.types import Array, LearnerState, Metrics, ParallelMap, Params, Step

CRITIC_KERNEL, CRITIC_BIAS = "critic.output.kernel", "critic.output.bias"


class MemoryPolicy(RecurrentPolicy):
    """A recurrent policy with a linear critic on its memory; see TrialPolicy."""

    def __init__(self, settings: MemorySettings, setup: Setup) -> None:
        super().__init__(setup, setup.policy)
        F, P = self.cell.feature_size, settings.position_size
        self.critic_size: int = 2 * F + P if P else F
        self._position_size, self._input_size = P, setup.policy.cell_spec(setup).seen_size

    def features(self, params: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
        """Return the memory's features; inputs after the policy's are ignored."""
        return super().features(params, inputs[..., : self._input_size])

    def judging(self, features: Tensor, inputs: Tensor) -> Tensor:
        """Return the inputs of the linear critic, [L, N, critic_size].

        If the critic sees the trial's end: the memory h, d·h with the remaining share d of discounted steps, and the
        position, whose last entry is d. A trial that pays r(h) at every step is worth d·r(h), which is linear in these
        inputs.
        """
        if not self._position_size:
            return features
        position = inputs[..., -self._position_size :]
        return torch.cat([features, features * position[..., -1:], position], -1)

    def inputs(self, trials: Trials) -> Array:
        return trials.inputs

    def acting(self, params: Mapping[str, Tensor], of: Sequences) -> Distribution:
        """Return the distributions [n] of actions at real steps."""
        return self.distribution(params, of.rows(self.features(params, of.inputs)))

    def judged(self, params: Mapping[str, Tensor], of: Sequences) -> tuple[Distribution, Tensor]:
        features = self.features(params, of.inputs)
        rows = of.rows(self.judging(features, of.inputs))
        values = torch.addmm(params[CRITIC_BIAS], rows, params[CRITIC_KERNEL]).squeeze(-1)
        return self.distribution(params, of.rows(features)), values

    def values(self, params: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
        features = self.judging(self.features(params, inputs), inputs)
        return torch.nn.functional.linear(features, params[CRITIC_KERNEL].t(), params[CRITIC_BIAS]).squeeze(-1)


class MemoryLearner(TrialLearner[Sequence[Step]]):
    """Learner of a recurrent policy, by gradient steps on minibatches of trials; see Learner."""

    policy: MemoryPolicy

    def __init__(self, settings: MemorySettings, setup: Setup) -> None:
        super().__init__(settings, setup, MemoryPolicy(settings, setup), (CRITIC_KERNEL, CRITIC_BIAS))
        self._output_scale = settings.initial_output_scale
        self.kernel: Kernel = Kernel("torch", "recurrent networks have no fused kernel")

    def initialize(self, *, run_seed: int) -> LearnerState:
        params = self.policy.initialize(generator(run_seed, "initialize"), self._output_scale)
        critic: Params = {
            CRITIC_KERNEL: np.zeros((self.policy.critic_size, 1), np.float32),
            CRITIC_BIAS: np.zeros(1, np.float32),
        }
        by_steps = self.settings if isinstance(self.settings, TrialSteps) else None
        optimizer = {} if by_steps is None else initial_state(by_steps.optimizer, params | critic)
        counter = np.array(0, np.int64)
        return LearnerState(params, optimizer, {**critic, CRITIC_SCALE: UNSCALED.copy(), NUM_UPDATES: counter})

    def update(
        self,
        state: LearnerState,
        experience: Sequence[Step],
        *,
        run_seed: int,
        iteration: int,
        parallel: ParallelMap = map,
    ) -> tuple[LearnerState, Metrics]:
        (step,) = experience
        return self.improved(state, step, run_seed=run_seed, iteration=iteration)

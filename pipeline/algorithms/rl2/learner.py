"""Recurrent policies as the stages use them: with values on their memory, learning from whole trials."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from metaloom.pipeline.algorithms.contract import NUM_UPDATES, Kernel, Learner, Setup
from metaloom.pipeline.algorithms.trials.losses import Sequences
from metaloom.pipeline.algorithms.trials.settings import MemorySettings, MemorySteps
from metaloom.pipeline.algorithms.trials.update import CRITIC_SCALE, UNSCALED, TrialEstimates, TrialUpdate
from metaloom.pipeline.estimation.trials import Trials
from metaloom.pipeline.nn.device import use_device
from metaloom.pipeline.nn.distributions import Distribution
from metaloom.pipeline.nn.torch_optimizers import initial_state
from metaloom.pipeline.policies.build import RecurrentPolicy
from metaloom.pipeline.policies.remembering import Remembering, remembered
from metaloom.pipeline.seeding import generator
from metaloom.pipeline.types import (
    Array,
    EpisodeBatch,
    LearnerState,
    Metrics,
    ParallelMap,
    Params,
    Samples,
    Step,
    TaskParams,
)

CRITIC_KERNEL, CRITIC_BIAS = "critic.output.kernel", "critic.output.bias"


class MemoryPolicy(RecurrentPolicy):
    """A recurrent policy with a layer of values on its memory; see TrialPolicy."""

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

        Where the trial's end is seen: the memory h, d·h with the share d of the discounted steps that are left, and the
        position, which d ends. A trial that pays the same r(h) at every step is worth d·r(h), so this is linear too.
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


class WithMemoryLearner(Learner[EpisodeBatch, Sequence[Step]]):
    """A policy that acts by its memory, however it learns; see Learner."""

    def __init__(self, settings: MemorySettings, setup: Setup) -> None:
        self.setup: Setup = setup
        self._output_scale = settings.initial_output_scale
        self.policy: MemoryPolicy = MemoryPolicy(settings, setup)
        self.estimates: TrialEstimates = TrialEstimates(settings, setup, self.policy, use_device(setup.device))
        self.kernel: Kernel = Kernel("torch", "recurrent networks have no fused kernel")

    def initial_optimizer(self, learned: Mapping[str, Array]) -> Params:
        """Return the initial state of the optimizer, by default none."""
        return {}

    def initialize(self, *, run_seed: int) -> LearnerState:
        params = self.policy.initialize(generator(run_seed, "initialize"), self._output_scale)
        critic: Params = {
            CRITIC_KERNEL: np.zeros((self.policy.critic_size, 1), np.float32),
            CRITIC_BIAS: np.zeros(1, np.float32),
        }
        optimizer = self.initial_optimizer(params | critic)
        counter = np.array(0, np.int64)
        return LearnerState(params, optimizer, {**critic, CRITIC_SCALE: UNSCALED.copy(), NUM_UPDATES: counter})

    def process(
        self, state: LearnerState, episodes: EpisodeBatch, *, seed: int, parallel: ParallelMap = map
    ) -> Samples:
        """Estimate along the trials with the values from before this update; see Learner."""
        return self.estimates.process(state.params | critic_of(state), state.extra[CRITIC_SCALE], episodes)

    def adapt(
        self, state: LearnerState, params: TaskParams, evidence: EpisodeBatch, *, parallel: ParallelMap = map
    ) -> TaskParams:
        return remembered(Remembering(self.setup.policy, self.setup, params, num_rows=1), params, evidence)


class MemoryLearner(WithMemoryLearner):
    """Learns by gradient steps on minibatches of trials; see Learner."""

    def __init__(self, settings: MemorySteps, setup: Setup) -> None:
        super().__init__(settings, setup)
        self._optimizer = settings.optimizer
        self._update = TrialUpdate(settings, self.policy, self.estimates)

    def initial_optimizer(self, learned: Mapping[str, Array]) -> Params:
        return initial_state(self._optimizer, learned)

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
        num_updates = int(state.extra[NUM_UPDATES])
        found = self._update.improve(
            state.params,
            critic_of(state),
            state.extra[CRITIC_SCALE],
            state.optimizer,
            step,
            num_updates=num_updates,
            run_seed=run_seed,
            iteration=iteration,
        )
        counter = np.array(num_updates + 1, np.int64)
        extra = {**state.extra, **found.critic, CRITIC_SCALE: found.scale, NUM_UPDATES: counter}
        return LearnerState(found.params, found.optimizer, extra), found.metrics


def critic_of(state: LearnerState) -> Params:
    """Return the parameters of the values."""
    return {name: state.extra[name] for name in (CRITIC_KERNEL, CRITIC_BIAS)}

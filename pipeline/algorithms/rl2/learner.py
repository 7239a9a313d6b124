"""RL2 as the stages use it: a recurrent policy with values on its memory, learning from whole trials."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from metaloom.pipeline.algorithms.contract import NUM_UPDATES, Kernel, Learner, Setup
from metaloom.pipeline.algorithms.rl2.settings import RL2
from metaloom.pipeline.algorithms.trials.losses import Sequences
from metaloom.pipeline.algorithms.trials.ppo import CRITIC_SCALE, UNSCALED, TrialPPO
from metaloom.pipeline.estimation.trials import Trials
from metaloom.pipeline.nn.device import use_device
from metaloom.pipeline.nn.distributions import Distribution
from metaloom.pipeline.nn.vector_optimizers import initial_state
from metaloom.pipeline.policies.recurrent import RecurrentPolicy
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


class RL2Policy(RecurrentPolicy):
    """A recurrent policy with a layer of values on its memory; see TrialPolicy."""

    def inputs(self, trials: Trials) -> Array:
        """All that trials show; see TrialPolicy."""
        return trials.inputs

    def judged(self, params: Mapping[str, Tensor], of: Sequences) -> tuple[Distribution, Tensor]:
        """See TrialPolicy."""
        rows = of.rows(self.features(params, of.inputs))
        values = torch.addmm(params[CRITIC_BIAS], rows, params[CRITIC_KERNEL]).squeeze(-1)
        return self.distribution(params, rows), values

    def values(self, params: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
        """See TrialPolicy."""
        features = self.features(params, inputs)
        return torch.nn.functional.linear(features, params[CRITIC_KERNEL].t(), params[CRITIC_BIAS]).squeeze(-1)


class RL2Learner(Learner[Step, Sequence[Step]]):
    """A policy that adapts by its memory; see Learner."""

    def __init__(self, settings: RL2, setup: Setup) -> None:
        self._settings, self._setup = settings, setup
        self._policy = RL2Policy(setup, setup.policy)
        self._ppo = TrialPPO(settings, setup, self._policy, use_device(setup.device))
        self.kernel = Kernel("torch", "recurrent networks have no fused kernel")

    def initialize(self, *, run_seed: int) -> LearnerState:
        """Return a policy that has learned nothing and values of zero; see Learner."""
        params = self._policy.initialize(generator(run_seed, "initialize"), self._settings.initial_output_scale)
        F = self._policy.cell.feature_size
        critic: Params = {CRITIC_KERNEL: np.zeros((F, 1), np.float32), CRITIC_BIAS: np.zeros(1, np.float32)}
        optimizer = initial_state(self._settings.optimizer, params | critic)
        counter = np.array(0, np.int64)
        return LearnerState(params, optimizer, {**critic, CRITIC_SCALE: UNSCALED.copy(), NUM_UPDATES: counter})

    def process(
        self, state: LearnerState, episodes: EpisodeBatch, *, seed: int, parallel: ParallelMap = map
    ) -> Samples:
        """Estimate along the trials, by the values as they are before they learn from them; see Learner."""
        del seed, parallel
        return self._ppo.process(state.params | _critic(state), state.extra[CRITIC_SCALE], episodes)

    def adapt_to_episodes(
        self,
        state: LearnerState,
        params: TaskParams,
        rounds: Sequence[EpisodeBatch],
        *,
        run_seed: int,
        parallel: ParallelMap = map,
    ) -> TaskParams:
        """Add what is remembered of the last round, whose episodes are one trial of every task; see Learner."""
        del state, run_seed, parallel
        return remembered(Remembering(self._setup.policy, self._setup, params, num_rows=1), params, rounds[-1])

    def update(
        self,
        state: LearnerState,
        experience: Sequence[Step],
        *,
        run_seed: int,
        iteration: int,
        parallel: ParallelMap = map,
    ) -> tuple[LearnerState, Metrics]:
        """Run the epochs of gradient steps on minibatches of trials; see Learner."""
        del parallel
        (step,) = experience
        num_updates = int(state.extra[NUM_UPDATES])
        found = self._ppo.improve(
            state.params,
            _critic(state),
            state.optimizer,
            step,
            num_updates=num_updates,
            run_seed=run_seed,
            iteration=iteration,
        )
        counter = np.array(num_updates + 1, np.int64)
        extra = {**state.extra, **found.critic, CRITIC_SCALE: found.scale, NUM_UPDATES: counter}
        return LearnerState(found.params, found.optimizer, extra), found.metrics


def _critic(state: LearnerState) -> Params:
    return {name: state.extra[name] for name in (CRITIC_KERNEL, CRITIC_BIAS)}

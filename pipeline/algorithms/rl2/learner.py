"""RL2 as the stages use it: a recurrent policy with values on its memory, learning from whole trials."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from metaloom.pipeline.algorithms.actor_critic.losses import clipped_surrogate
from metaloom.pipeline.algorithms.contract import NUM_UPDATES, Kernel, Learner, Setup
from metaloom.pipeline.algorithms.finite_checks import require_finite_params
from metaloom.pipeline.algorithms.rl2.batch import Batch
from metaloom.pipeline.algorithms.rl2.losses import Sequences, Weights, clip_fraction, sequence_loss
from metaloom.pipeline.algorithms.rl2.settings import RL2
from metaloom.pipeline.estimation.processing import scale
from metaloom.pipeline.estimation.returns import discounted_returns
from metaloom.pipeline.estimation.trials import Trials
from metaloom.pipeline.nn.descent import Descent
from metaloom.pipeline.nn.device import use_device
from metaloom.pipeline.nn.flat_tensors import FlatTensors
from metaloom.pipeline.nn.schedules import lr_factor
from metaloom.pipeline.nn.vector_optimizers import initial_state
from metaloom.pipeline.policies.recurrent import RecurrentPolicy
from metaloom.pipeline.policies.remembering import Remembering, recollect
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
CRITIC_SCALE = "critic.scale"
"""Mean and standard deviation of the targets of the last update, [2]: a layer of values in these units has no long way
to the returns of whole trials, and large rewards do not drown the policy's gradient in that of the values."""


class RL2Learner(Learner[Step, Sequence[Step]]):
    """A policy that adapts by its memory; see Learner."""

    def __init__(self, settings: RL2, setup: Setup) -> None:
        self._settings, self._setup, self._processing = settings, setup, setup.processing
        self._device = use_device(setup.device)
        self._policy = RecurrentPolicy(setup, setup.policy)
        self._lr_factor = lr_factor(settings, settings.learning_rate)
        self._weights = Weights(settings.clip_eps, settings.value_coeff, settings.entropy_coeff)
        self.kernel = Kernel("torch", "recurrent networks have no fused kernel")

    def initialize(self, *, run_seed: int) -> LearnerState:
        """Return a policy that has learned nothing and values of zero; see Learner."""
        params = self._policy.initialize(generator(run_seed, "initialize"), self._settings.initial_output_scale)
        F = self._policy.cell.feature_size
        critic: Params = {CRITIC_KERNEL: np.zeros((F, 1), np.float32), CRITIC_BIAS: np.zeros(1, np.float32)}
        optimizer = initial_state(self._settings.optimizer, params | critic)
        scale = np.array([0, 1], np.float32)
        return LearnerState(params, optimizer, {**critic, CRITIC_SCALE: scale, NUM_UPDATES: np.array(0, np.int64)})

    def process(
        self, state: LearnerState, episodes: EpisodeBatch, *, seed: int, parallel: ParallelMap = map
    ) -> Samples:
        """Estimate along the trials, by the values as they are before they learn from them; see Learner."""
        del seed, parallel
        trials, processing = self._trials(episodes), self._processing
        values = self._values(state, trials)
        advantages = trials.by_episode(trials.advantages(values, processing.discount, processing.gae_lambda))
        mask = episodes.mask
        # Statistics are those of all tasks together: most have a trial or two, of a few steps at worst.
        together = (-1, mask.shape[2])
        scaled = scale(advantages.reshape(together), mask.reshape(together), processing)
        return Samples(
            returns=trials.by_episode(discounted_returns(trials.rewards, processing.discount)).astype(np.float32),
            values=trials.by_episode(values).astype(np.float32),
            advantages=scaled.reshape(mask.shape).astype(np.float32),
            mask=mask,
        )

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
        remembering = Remembering(self._setup.policy, self._setup, params, num_rows=1)
        last = rounds[-1]
        for e in range(last.rewards.shape[1]):
            one = slice(e, e + 1)
            recollect(
                remembering, last.observations[:, one], last.actions[:, one], last.rewards[:, one], last.lengths[:, one]
            )
        return TaskParams({**params.params, **remembering.memory.of_task()})

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
        settings, num_updates = self._settings, int(state.extra[NUM_UPDATES])
        rate = settings.learning_rate * self._lr_factor(num_updates)
        critic = {name: state.extra[name] for name in (CRITIC_KERNEL, CRITIC_BIAS)}
        learned = [*self._policy.learned(state.params), *critic]
        flat = FlatTensors(state.params | critic, self._device, learned)
        descent = Descent(settings.optimizer, flat, state.optimizer)
        trials = self._trials(step.episodes)
        batch = Batch(trials, step.samples, self._policy, self._processing, self._device)
        norms: list[Tensor] = []
        for epoch in range(settings.num_epochs):
            order = generator(run_seed, "minibatches", iteration, epoch).permutation(len(batch))
            for rows in np.array_split(order, -(-len(batch) // settings.trials_per_minibatch)):
                of = batch.sequences(rows)
                norms.append(descent.down(self._loss(flat.params, of), rate, settings.max_grad_norm))
        after = flat.copies()
        params = {name: after[name] for name in state.params}
        critic = {name: after[name] for name in critic}
        require_finite_params(
            {"the policy": params, "the critic": critic},
            stage="meta_optimize",
            advice="Lower algorithm.learning_rate or set algorithm.max_grad_norm",
        )
        metrics = {
            **self._described(flat.params, batch, step.episodes),
            # Read only now, so that a device is not waited for before its work.
            "gradient_norm": float(torch.stack(norms).mean()),
            "learning_rate": rate,
        }
        counter = np.array(num_updates + 1, np.int64)
        extra = {**state.extra, **critic, CRITIC_SCALE: batch.scale, NUM_UPDATES: counter}
        return LearnerState(params, descent.state, extra), metrics

    def _loss(self, params: Mapping[str, Tensor], of: Sequences) -> Tensor:
        rows = of.rows(self._policy.features(params, of.inputs))
        values = torch.addmm(params[CRITIC_BIAS], rows, params[CRITIC_KERNEL]).squeeze(-1)
        return sequence_loss(self._policy.distribution(params, rows), values, of, self._weights)

    @torch.no_grad()
    def _described(self, params: Mapping[str, Tensor], batch: Batch, episodes: EpisodeBatch) -> Metrics:
        of = batch.sequences(np.arange(len(batch)))
        rows = of.rows(self._policy.features(params, of.inputs))
        now = self._policy.distribution(params, rows)
        values = torch.addmm(params[CRITIC_BIAS], rows, params[CRITIC_KERNEL]).squeeze(-1)
        log_prob = now.log_prob(of.actions)
        described = {
            "loss_after": clipped_surrogate(log_prob, of.old_log_prob, of.advantages, self._settings.clip_eps),
            "value_loss_after": 0.5 * (values - of.targets).square().mean() * float(batch.scale[1]) ** 2,
            "kl": batch.recorded.kl(now).mean(),
            "entropy_after": now.entropy().mean(),
            "clip_fraction": clip_fraction(log_prob, of.old_log_prob, self._settings.clip_eps),
        }
        by_place = episodes.episode_returns.reshape(len(episodes.lengths), self._settings.episodes_per_trial, -1)
        ends = {"first_episode_return": by_place[:, 0].mean(), "last_episode_return": by_place[:, -1].mean()}
        return {name: float(value) for name, value in {**described, **ends}.items()}

    def _values(self, state: LearnerState, trials: Trials) -> Array:
        """V [N, L] float32, of the steps of trials."""
        params = {name: torch.tensor(value, device=self._device) for name, value in state.params.items()}
        kernel, bias = (torch.tensor(state.extra[name], device=self._device) for name in (CRITIC_KERNEL, CRITIC_BIAS))
        with torch.no_grad():
            inputs = torch.from_numpy(np.ascontiguousarray(trials.inputs.swapaxes(0, 1))).to(self._device)
            values = torch.nn.functional.linear(self._policy.features(params, inputs), kernel.t(), bias)
        mean, std = state.extra[CRITIC_SCALE]
        return np.ascontiguousarray(values.squeeze(-1).t().cpu().numpy()) * std + mean

    def _trials(self, episodes: EpisodeBatch) -> Trials:
        return Trials(episodes, self._settings.episodes_per_trial, self._setup.num_actions)

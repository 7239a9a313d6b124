"""Estimates along trials, and the update of a policy and its values: epochs of gradient steps on whole trials."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from metaloom.pipeline.algorithms.actor_critic.gradient_steps import clip_fraction, policy_loss
from metaloom.pipeline.algorithms.contract import Setup
from metaloom.pipeline.algorithms.finite_checks import require_finite_params
from metaloom.pipeline.algorithms.trials.losses import Batch, Sequences, TrialPolicy, Weights, sequence_loss
from metaloom.pipeline.algorithms.trials.settings import TrialSettings, TrialSteps
from metaloom.pipeline.estimation.processing import scale
from metaloom.pipeline.estimation.returns import discounted_returns
from metaloom.pipeline.estimation.trials import Trials
from metaloom.pipeline.nn.flat_tensors import Descent, FlatTensors
from metaloom.pipeline.nn.schedules import LrFactor, lr_factor
from metaloom.pipeline.seeding import generator
from metaloom.pipeline.types import Array, EpisodeBatch, Metrics, Params, Samples, Step

CRITIC_SCALE = "critic.scale"
"""Mean and standard deviation of the targets of the last update, [2]: values in these units have no long way to the
returns of whole trials, and large rewards do not drown the policy's gradient in the values' gradient."""
UNSCALED = np.array([0, 1], np.float32)
"""Before the first update."""


class TrialEstimates:
    """Trials of an iteration with their estimates; holds no parameters."""

    def __init__(self, settings: TrialSettings, setup: Setup, policy: TrialPolicy, device: torch.device) -> None:
        self.device: torch.device = device
        self._settings, self._setup, self._policy = settings, setup, policy

    def trials(self, episodes: EpisodeBatch) -> Trials:
        """Return the trials that some episodes are."""
        return Trials(episodes, self._settings.episodes_per_trial, self._setup.num_actions)

    def inputs(self, trials: Trials) -> Array:
        """Return the policy's inputs followed by the critic-only inputs, [N, L, in] float32."""
        inputs = self._policy.inputs(trials)
        if not self._settings.position_size:
            return inputs
        position = trials.position(self._setup.max_episode_steps, self._setup.processing.discount)
        return np.concatenate([inputs, position], axis=-1)

    def process(self, params: Mapping[str, Array], values_scale: Array, episodes: EpisodeBatch) -> Samples:
        """Estimate along the trials with the values from before this update."""
        trials, processing = self.trials(episodes), self._setup.processing
        values, behind = self._values(params, values_scale, trials)
        raw = trials.advantages(values, processing.discount, processing.gae_lambda, behind)
        advantages = trials.by_episode(raw)
        mask = episodes.mask
        # Statistics are over all tasks together: most have a trial or two, of a few steps at worst.
        together = (-1, mask.shape[2])
        scaled = scale(advantages.reshape(together), mask.reshape(together), processing)
        return Samples(
            returns=trials.by_episode(discounted_returns(trials.rewards, processing.discount)).astype(np.float32),
            values=trials.by_episode(values).astype(np.float32),
            advantages=scaled.reshape(mask.shape).astype(np.float32),
            mask=mask,
        )

    def batch(self, params: Mapping[str, Array], values_scale: Array, step: Step) -> Batch:
        """Return the trials of a step to learn from, processed with the same parameters; see `process`."""
        trials = self.trials(step.episodes)
        behind = self._values(params, values_scale, trials)[1] if self._settings.trial_end == "bootstrapped" else None
        return Batch(
            trials, step.samples, self.inputs(trials), self._policy, self._setup.processing, self.device, behind
        )

    def metrics(self, episodes: EpisodeBatch, batch: Batch) -> Metrics:
        """Describe trials: mean returns of their first and last episodes, and advantages at an end that is seen."""
        by_place = episodes.episode_returns.reshape(len(episodes.lengths), self._settings.episodes_per_trial, -1)
        ends = {"first_episode_return": by_place[:, 0], "last_episode_return": by_place[:, -1]}
        found = {name: float(returns.mean()) for name, returns in ends.items()}
        return found | (batch.end_advantages if self._settings.position_size else {})

    def _values(self, params: Mapping[str, Array], values_scale: Array, trials: Trials) -> tuple[Array, Array | None]:
        """Return V [N, L] of the steps of trials, and the value credited after their ends, [N]; float32."""
        if self._settings.trial_end != "bootstrapped":
            return self._values_of(params, values_scale, self.inputs(trials)), None
        # One pass: the knowledge after the last step follows from the knowledge in it.
        values = self._values_of(params, values_scale, trials.inputs_to_end)
        behind = values[np.arange(len(trials)), trials.lengths]
        return values[:, :-1], np.where(trials.cut, behind, 0)

    @torch.no_grad()
    def _values_of(self, params: Mapping[str, Array], values_scale: Array, inputs: Array) -> Array:
        """Return V [N, L] float32, of inputs [N, L, in]."""
        tensors = {name: torch.tensor(value, device=self.device) for name, value in params.items()}
        rows = torch.from_numpy(np.ascontiguousarray(inputs.swapaxes(0, 1))).to(self.device)
        values = self._policy.values(tensors, rows)
        mean, std = values_scale
        return np.ascontiguousarray(values.t().cpu().numpy()) * std + mean


@dataclass(frozen=True)
class Improved:
    """Result of an update.

    Attributes:
        params: Parameters of the policy.
        critic: Parameters of the values.
        optimizer: State of the optimizer.
        scale: Scale of the values; see CRITIC_SCALE.
        metrics: Metrics of the update.
    """

    params: Params
    critic: Params
    optimizer: Params
    scale: Array
    metrics: Metrics


class TrialUpdate:
    """Gradient steps of a policy that acts on the history of a trial; holds no parameters.

    Attributes:
        lr_factor: Factor on step sizes as a function of the number of updates.
    """

    def __init__(self, settings: TrialSteps, policy: TrialPolicy, estimates: TrialEstimates) -> None:
        self._settings, self._policy, self._estimates = settings, policy, estimates
        self.lr_factor: LrFactor = lr_factor(settings, settings.learning_rate)
        self._weights = Weights(settings.policy_clip, settings.value_coeff, settings.entropy_coeff)

    def improve(
        self,
        params: Params,
        critic: Params,
        values_scale: Array,
        optimizer: Params,
        step: Step,
        *,
        num_updates: int,
        run_seed: int,
        iteration: int,
    ) -> Improved:
        """Run the epochs of gradient steps on minibatches of trials.

        Raises:
            NumericalError: naming what is not finite.
        """
        settings = self._settings
        rate = settings.learning_rate * self.lr_factor(num_updates)
        batch = self._estimates.batch(params | critic, values_scale, step)
        flat = FlatTensors(params | critic, self._estimates.device, [*self._policy.learned(params), *critic])
        descent = Descent(settings.optimizer, flat, optimizer)
        norms: list[Tensor] = []
        for epoch in range(settings.num_epochs):
            order = generator(run_seed, "minibatches", iteration, epoch).permutation(len(batch))
            for rows in np.array_split(order, -(-len(batch) // settings.trials_per_minibatch)):
                of = batch.sequences(rows)
                loss = sequence_loss(*self._policy.judged(flat.params, of), of, self._weights)
                norms.append(descent.down(loss, rate, settings.max_grad_norm))
        after = flat.copies()
        params, critic = ({name: after[name] for name in of} for of in (params, critic))
        require_finite_params(
            {"the policy": params, "the critic": critic},
            stage="meta_optimize",
            advice="Lower algorithm.learning_rate or set algorithm.max_grad_norm",
        )
        metrics = {
            **self._described(flat.params, batch),
            **self._estimates.metrics(step.episodes, batch),
            # Read only now, so that nothing waits for the device before all work is queued.
            "gradient_norm": float(torch.stack(norms).mean()),
            "learning_rate": rate,
        }
        return Improved(params, critic, descent.state, batch.scale, metrics)

    @torch.no_grad()
    def _described(self, params: Mapping[str, Tensor], batch: Batch) -> Metrics:
        all_trials = np.arange(len(batch))
        of: Sequences = batch.sequences(all_trials)
        now, values = self._policy.judged(params, of)
        log_prob = now.log_prob(of.actions)
        clip_eps = self._settings.policy_clip
        described = {
            "loss_after": policy_loss(log_prob, of.old_log_prob, of.advantages, clip_eps),
            "value_loss_after": 0.5 * (values - of.targets).square().mean() * float(batch.scale[1]) ** 2,
            "kl": batch.recorded(all_trials).kl(now).mean(),
            "entropy_after": now.entropy().mean(),
        }
        if clip_eps is not None:
            described["clip_fraction"] = clip_fraction(log_prob, of.old_log_prob, clip_eps)
        return {name: float(value) for name, value in described.items()}

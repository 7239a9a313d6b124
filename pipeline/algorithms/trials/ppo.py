"""PPO on whole trials: estimates along them, and the epochs of an update."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from metaloom.pipeline.algorithms.actor_critic.losses import clipped_surrogate
from metaloom.pipeline.algorithms.contract import Setup
from metaloom.pipeline.algorithms.finite_checks import require_finite_params
from metaloom.pipeline.algorithms.trials.batch import Batch
from metaloom.pipeline.algorithms.trials.losses import Sequences, TrialPolicy, Weights, clip_fraction, sequence_loss
from metaloom.pipeline.algorithms.trials.settings import TrialSettings
from metaloom.pipeline.estimation.processing import scale
from metaloom.pipeline.estimation.returns import discounted_returns
from metaloom.pipeline.estimation.trials import Trials
from metaloom.pipeline.nn.descent import Descent
from metaloom.pipeline.nn.flat_tensors import FlatTensors
from metaloom.pipeline.nn.schedules import lr_factor
from metaloom.pipeline.seeding import generator
from metaloom.pipeline.types import Array, EpisodeBatch, Metrics, Params, Samples, Step

CRITIC_SCALE = "critic.scale"
"""Mean and standard deviation of the targets of the last update, [2]: values in these units have no long way to the
returns of whole trials, and large rewards do not drown the policy's gradient in that of the values."""
UNSCALED = np.array([0, 1], np.float32)
"""Before the first update."""


@dataclass(frozen=True)
class Improved:
    """Result of an update.

    Attributes:
        params: the policy's.
        critic: the values'.
        optimizer: its state.
        scale: of the values; see CRITIC_SCALE.
        metrics: what describes it.
    """

    params: Params
    critic: Params
    optimizer: Params
    scale: Array
    metrics: Metrics


class TrialPPO:
    """Estimates and gradient steps of a policy that adapts within a trial; holds no parameters.

    Attributes:
        lr_factor: of step sizes, after so many updates.
    """

    def __init__(self, settings: TrialSettings, setup: Setup, policy: TrialPolicy, device: torch.device) -> None:
        self._settings, self._setup, self._policy, self._device = settings, setup, policy, device
        self.lr_factor = lr_factor(settings, settings.learning_rate)
        self._weights = Weights(settings.clip_eps, settings.value_coeff, settings.entropy_coeff)

    def trials(self, episodes: EpisodeBatch) -> Trials:
        """Return the trials that some episodes are."""
        return Trials(episodes, self._settings.episodes_per_trial, self._setup.num_actions)

    def process(self, params: Mapping[str, Array], values_scale: Array, episodes: EpisodeBatch) -> Samples:
        """Estimate along the trials, by the values as they are before they learn from them.

        Args:
            params: of the policy and of the values.
            values_scale: see CRITIC_SCALE.
            episodes: whole trials.
        """
        trials, processing = self.trials(episodes), self._setup.processing
        values = self._values(params, values_scale, trials)
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

    def improve(
        self,
        params: Params,
        critic: Params,
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
        flat = FlatTensors(params | critic, self._device, [*self._policy.learned(params), *critic])
        descent = Descent(settings.optimizer, flat, optimizer)
        batch = Batch(self.trials(step.episodes), step.samples, self._policy, self._setup.processing, self._device)
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
            **self._described(flat.params, batch, step.episodes),
            # Read only now, so that a device is not waited for before its work.
            "gradient_norm": float(torch.stack(norms).mean()),
            "learning_rate": rate,
        }
        return Improved(params, critic, descent.state, batch.scale, metrics)

    @torch.no_grad()
    def _described(self, params: Mapping[str, Tensor], batch: Batch, episodes: EpisodeBatch) -> Metrics:
        of: Sequences = batch.sequences(np.arange(len(batch)))
        now, values = self._policy.judged(params, of)
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

    @torch.no_grad()
    def _values(self, params: Mapping[str, Array], values_scale: Array, trials: Trials) -> Array:
        """V [N, L] float32, of the steps of trials."""
        tensors = {name: torch.tensor(value, device=self._device) for name, value in params.items()}
        inputs = torch.from_numpy(np.ascontiguousarray(self._policy.inputs(trials).swapaxes(0, 1))).to(self._device)
        values = self._policy.values(tensors, inputs)
        mean, std = values_scale
        return np.ascontiguousarray(values.t().cpu().numpy()) * std + mean

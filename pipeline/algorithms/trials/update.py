"""The update of a policy and its values on whole trials: epochs of gradient steps on minibatches of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from metaloom.pipeline.algorithms.actor_critic.gradient_steps import policy_loss
from metaloom.pipeline.algorithms.finite_checks import require_finite_params
from metaloom.pipeline.algorithms.trials.estimates import TrialEstimates
from metaloom.pipeline.algorithms.trials.losses import (
    Batch,
    Sequences,
    TrialPolicy,
    Weights,
    clip_fraction,
    sequence_loss,
)
from metaloom.pipeline.algorithms.trials.settings import TrialSteps
from metaloom.pipeline.nn.flat_tensors import Descent, FlatTensors
from metaloom.pipeline.nn.schedules import lr_factor
from metaloom.pipeline.seeding import generator
from metaloom.pipeline.types import Array, Metrics, Params, Step


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


class TrialUpdate:
    """Gradient steps of a policy that acts by what it has seen of a trial; holds no parameters.

    Attributes:
        lr_factor: of step sizes, after so many updates.
    """

    def __init__(self, settings: TrialSteps, policy: TrialPolicy, estimates: TrialEstimates) -> None:
        self._settings, self._policy, self._estimates = settings, policy, estimates
        self.lr_factor = lr_factor(settings, settings.learning_rate)
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
            # Read only now, so that a device is not waited for before its work.
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

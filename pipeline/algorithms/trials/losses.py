"""Losses on whole trials, in torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from metaloom.pipeline.algorithms.actor_critic.gradient_steps import policy_loss
from metaloom.pipeline.estimation.config import ProcessingConfig
from metaloom.pipeline.estimation.trials import Trials
from metaloom.pipeline.nn.distributions import Distribution
from metaloom.pipeline.types import Array, Metrics, Samples


@dataclass(frozen=True)
class Sequences:
    """Trials [L, N] for a gradient step, time first as recurrent networks require, with n real steps in all."""

    inputs: Tensor  # policy inputs, then the position in the trial if the critic sees it, [L, N, in]
    real: Tensor | None  # indices of the real steps among the L·N steps, [n]; None if all are real
    actions: Tensor  # [n, A] or [n]
    old_log_prob: Tensor  # [n]
    advantages: Tensor  # [n]
    targets: Tensor  # value targets in the critic's units, [n]

    def rows(self, features: Tensor) -> Tensor:
        """Return the rows [n, F] of features [L, N, F] at real steps."""
        return _rows(features, self.real)


class TrialPolicy(Protocol):
    """A policy that adapts within a trial, and its critic, as functions of explicit parameters."""

    def learned(self, params: Mapping[str, object]) -> tuple[str, ...]:
        """Return the names of the policy's trained parameters, in order."""
        ...

    def inputs(self, trials: Trials) -> Array:
        """Return the policy's inputs at each step of the trials, [N, L, in] float32."""
        ...

    def recorded(self, behavior: Mapping[str, Tensor]) -> Distribution:
        """Rebuild the behavior policy's distributions from their recorded arrays, [...] each."""
        ...

    def judged(self, params: Mapping[str, Tensor], of: Sequences) -> tuple[Distribution, Tensor]:
        """Return action distributions [n] at real steps, and values [n] in the critic's units."""
        ...

    def values(self, params: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
        """Return values [L, N] for inputs [L, N, in], in the critic's units."""
        ...


def sequence_loss(
    now: Distribution, values: Tensor, of: Sequences, *, clip_eps: float | None, value: float, entropy: float
) -> Tensor:
    """Return -mean min(r A, clip(r, 1 ± ε) A) + c_v ½ mean (v - R̂)² - c_e mean H, over the real steps of all trials.

    Schulman et al. 2017, arXiv:1707.06347, eq. 7 and 9, where r = π(a|h) / π_old(a|h) and v depend on the history h of
    the trial. If h is the state of a trained network, the gradient flows back through all earlier steps. Without
    clipping, the first term is -mean A log π(a|h), the policy-gradient loss.
    """
    loss = policy_loss(now.log_prob(of.actions), of.old_log_prob, of.advantages, clip_eps)
    loss = loss + value * 0.5 * (values - of.targets).square().mean()
    return loss - entropy * now.entropy().mean() if entropy else loss


_SMALLEST_STD = 1e-4  # lower bound on the targets' standard deviation, which is 0 if all targets are equal


class Batch:
    """All trials of an iteration, time first."""

    def __init__(
        self,
        trials: Trials,
        samples: Samples,
        inputs: Array,
        policy: TrialPolicy,
        processing: ProcessingConfig,
        device: torch.device,
        behind: Array | None = None,
    ) -> None:
        """Move an iteration's trials to a device; `behind` [N] is the value credited after each trial's end, if any."""
        self._device = device
        values = trials.along(samples.values)
        # Stored advantages are shifted and scaled; advantages in targets must not be.
        targets = values + trials.advantages(values, processing.discount, processing.gae_lambda, behind)
        real_targets = targets[trials.mask]
        # Mean and standard deviation of the critic's targets over all real steps.
        self.scale: Array = np.array([real_targets.mean(), max(real_targets.std(), _SMALLEST_STD)], np.float32)
        self._inputs, self._actions = self._tensor(inputs), self._tensor(trials.actions)
        advantages = trials.along(samples.advantages)
        self._advantages = self._tensor(advantages)
        end = advantages[trials.mask & (np.arange(advantages.shape[1]) >= trials.lengths[:, None] * 11 // 12)]
        at_end, of_all = (float(np.square(of, dtype=np.float64).sum()) for of in (end, advantages[trials.mask]))
        # Near 1/12 if the critic sees the end.
        share = at_end / of_all if of_all else 0.0
        self.end_advantages: Metrics = {"end_advantage_share": share, "end_advantage_mean": float(end.mean())}
        mean, std = self.scale
        self._targets = self._tensor(((targets - mean) / std).astype(np.float32))
        self._real = None if trials.mask.all() else self._tensor(trials.mask)
        self._behavior = {name: self._tensor(value) for name, value in trials.behavior.items()}
        self._policy = policy
        self._old_log_prob = policy.recorded(self._behavior).log_prob(self._actions)

    def __len__(self) -> int:
        return self._inputs.shape[1]

    def sequences(self, which: Array) -> Sequences:
        """Return the trials with these indices, [N'], as sequences."""
        chosen, real = self._chosen(which)
        parts = (self._actions, self._old_log_prob, self._advantages, self._targets)
        return Sequences(self._inputs[:, chosen], real, *(_rows(part[:, chosen], real) for part in parts))

    def recorded(self, which: Array) -> Distribution:
        """Return the behavior policy's distributions [n] for the given trials, in the order of `sequences`."""
        chosen, real = self._chosen(which)
        return self._policy.recorded({name: _rows(value[:, chosen], real) for name, value in self._behavior.items()})

    def _chosen(self, which: Array) -> tuple[Tensor, Tensor | None]:
        """Return trial indices as a tensor, and the flat indices of their real steps, or None if every step is real."""
        chosen = torch.from_numpy(which).to(self._device)
        return chosen, None if self._real is None else self._real[:, chosen].flatten().nonzero().squeeze(-1)

    def _tensor(self, values: Array) -> Tensor:
        """Convert an array [N, L, ...] to a tensor with time first."""
        return torch.from_numpy(np.ascontiguousarray(values.swapaxes(0, 1))).to(self._device)


def _rows(values: Tensor, real: Tensor | None) -> Tensor:
    """Return values [L, N, ...] at real steps, as [n, ...]."""
    flat = values.flatten(0, 1)
    return flat if real is None else flat[real]

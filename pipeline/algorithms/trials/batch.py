"""An iteration's trials on a device, of which gradient steps take some."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from metaloom.pipeline.algorithms.trials.losses import Sequences, TrialPolicy
from metaloom.pipeline.estimation.config import ProcessingConfig
from metaloom.pipeline.estimation.trials import Trials
from metaloom.pipeline.nn.distributions import Distribution
from metaloom.pipeline.types import Array, Metrics, Samples

_SMALLEST_STD = 1e-4
"""Where all targets are equal there is nothing to divide by."""


class Batch:
    """All trials of an iteration, time first.

    Attributes:
        scale: mean and standard deviation of the values' targets over all real steps, [2] float32.
        end_advantages: share of all squared advantages in the last twelfth of every trial, and their mean there: near
            1/12 and 0 where the critic sees the end.
    """

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
        """Take an iteration's trials to a device.

        Args:
            trials: of the iteration.
            samples: made of them.
            inputs: [N, L, in], of policy and critic.
            policy: that acted and learns.
            processing: section of the settings.
            device: where torch computes.
            behind: [N], what trials' ends are credited with; None for nothing.
        """
        self._device = device
        values = trials.along(samples.values)
        # Not the stored advantages: those are shifted and scaled.
        targets = values + trials.advantages(values, processing.discount, processing.gae_lambda, behind)
        real_targets = targets[trials.mask]
        self.scale = np.array([real_targets.mean(), max(real_targets.std(), _SMALLEST_STD)], np.float32)
        self._inputs, self._actions = self._tensor(inputs), self._tensor(trials.actions)
        advantages = trials.along(samples.advantages)
        self._advantages = self._tensor(advantages)
        end = advantages[trials.mask & (np.arange(advantages.shape[1]) >= trials.lengths[:, None] * 11 // 12)]
        at_end, of_all = (float(np.square(of, dtype=np.float64).sum()) for of in (end, advantages[trials.mask]))
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
        """Some of the trials."""
        chosen = torch.from_numpy(which).to(self._device)
        real = self._places(None if self._real is None else self._real[:, chosen])
        parts = (self._actions, self._old_log_prob, self._advantages, self._targets)
        return Sequences(self._inputs[:, chosen], real, *(_rows(part[:, chosen], real) for part in parts))

    def recorded(self, which: Array) -> Distribution:
        """The distributions [n] that acted in some of the trials, in the order of their `sequences`."""
        chosen = torch.from_numpy(which).to(self._device)
        real = self._places(None if self._real is None else self._real[:, chosen])
        return self._policy.recorded({name: _rows(value[:, chosen], real) for name, value in self._behavior.items()})

    @staticmethod
    def _places(real: Tensor | None) -> Tensor | None:
        return None if real is None else real.flatten().nonzero().squeeze(-1)

    def _tensor(self, values: Array) -> Tensor:
        """Time first."""
        return torch.from_numpy(np.ascontiguousarray(values.swapaxes(0, 1))).to(self._device)


def _rows(values: Tensor, real: Tensor | None) -> Tensor:
    """[n, ...] of [L, N, ...]."""
    flat = values.flatten(0, 1)
    return flat if real is None else flat[real]

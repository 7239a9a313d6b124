"""Losses of the gradient-based family, one value per task. Written with tensor methods only: no torch import."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.distributions import DiagGaussian, likelihood_ratio

if TYPE_CHECKING:
    from torch import Tensor

    from pipeline.algorithms.rows import TaskRows


def likelihood_ratio_loss(current: DiagGaussian, rows: TaskRows) -> Tensor:
    """-mean(r A) with r = π_θ(a|o) / π_behavior(a|o), for every task: [b].

    Its second derivative keeps the term A ∇log π ∇log πᵀ (low-variance curvature, Rothfuss et al. 2019).
    """
    ratio = likelihood_ratio(current.log_prob(rows.actions), rows.behavior_log_prob)
    return -rows.mean(ratio * rows.advantages)


def clipped_surrogate(ratio: Tensor, rows: TaskRows, clip_eps: float) -> Tensor:
    """-mean(min(r A, clip(r, 1 - ε, 1 + ε) A)) for every task: [b]. Schulman et al. 2017, arXiv:1707.06347, eq. 7."""
    clipped = ratio.clamp(1 - clip_eps, 1 + clip_eps)
    return -rows.mean((ratio * rows.advantages).minimum(clipped * rows.advantages))

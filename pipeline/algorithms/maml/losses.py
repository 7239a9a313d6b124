"""Losses of the gradient-based family, one value per task: [b]."""

from collections.abc import Sequence

import torch
from torch import Tensor

from metaloom.pipeline.algorithms.maml.rows import Chunk, EpisodeRows, TaskRows
from metaloom.pipeline.nn.distributions import Distribution, likelihood_ratio

LOSS = "loss"
"""Name of the quantity that a meta-update minimizes."""

INNER_KL = "inner_kl_"
"""Prefix of the KLs before adaptation, from the policy that collected rollout batch k to the current one."""

OUTER_KL = "outer_kl"
"""Name of the KL after adaptation, likewise."""


def ratios(current: Distribution, rows: TaskRows) -> Tensor:
    """Return the likelihood ratios π_θ(a|o) / π_behavior(a|o) of the current policy to the one that acted, [b, N]."""
    return likelihood_ratio(current.log_prob(rows.actions), rows.behavior_log_prob)


def likelihood_ratio_loss(current: Distribution, rows: TaskRows) -> Tensor:
    """Return -mean(r A) with r = π_θ(a|o) / π_behavior(a|o), for every task: [b].

    Its second derivative keeps the term A ∇log π ∇log πᵀ (low-variance curvature, Rothfuss et al. 2019).
    """
    return -rows.mean(ratios(current, rows) * rows.advantages)


def log_likelihood_loss(current: Distribution, rows: TaskRows) -> Tensor:
    """Return -mean(A log π_θ(a|o)) for every task: [b]. Williams 1992.

    Where π_θ acted, its gradient equals likelihood_ratio_loss's; its second derivative lacks A ∇log π ∇log πᵀ.
    """
    return -rows.mean(current.log_prob(rows.actions) * rows.advantages)


INNER_LOSSES = {"log_likelihood": log_likelihood_loss, "likelihood_ratio": likelihood_ratio_loss}
"""By the names of the setting `inner_loss`."""


def clip_fraction(ratio: Tensor, rows: TaskRows, clip_eps: float) -> Tensor:
    """Return the share of a task's steps whose ratio lies outside of [1 - ε, 1 + ε]: [b]."""
    return rows.mean(((ratio.detach() - 1).abs() > clip_eps).to(ratio.dtype))


def policy_kls(current: Sequence[Distribution], chunk: Chunk) -> dict[str, Tensor]:
    """Return KLs from the acting to the current policies, without gradient: `inner_kl_k` and `outer_kl`, [b].

    Args:
        current: Policies after k inner steps on the rows of rollout batch k, for k = 0 ... K.
        chunk: Rows of these rollout batches.
    """
    kls = [rows.mean(rows.behavior.kl(now.detach())) for now, rows in zip(current, chunk.rounds, strict=True)]
    return {**{f"{INNER_KL}{k}": kl for k, kl in enumerate(kls[:-1])}, OUTER_KL: kls[-1]}


def dice_loss(current: Distribution, rows: TaskRows) -> Tensor:
    """Return -(1 / E T) Σ_{e,t} ☐_t c_t, ☐_t = exp(τ_t - ⊥τ_t), τ_t = Σ_{t' ≤ t} log π_θ(a_t'|o_t'), each task's [b].

    Foerster et al. 2018, arXiv:1802.05098, with the adjusted rewards as c and a mean over E T cells. ☐ is 1, so the
    value does not depend on θ; derivatives of every order estimate the derivatives of the expected return.
    """
    episodes = _episodes_of(rows)
    log_prob = sums_over_time(episodes.split(current.log_prob(rows.actions)))
    magic_box = (log_prob - log_prob.detach()).exp()
    return -episodes.mean_over_cells(magic_box * episodes.adjusted_rewards)


def sums_over_time(values: Tensor) -> Tensor:
    """Return Σ_{t' ≤ t} of values [..., T]."""
    # On a GPU cumsum has no deterministic algorithm; on the CPU a product would change the last bits of stored runs.
    return values.cumsum(-1) if values.device.type == "cpu" else sums_by_product(values)


def sums_by_product(values: Tensor) -> Tensor:
    """Return Σ_{t' ≤ t} of values [..., T], as a product with a triangular matrix."""
    T = values.shape[-1]
    return values @ torch.ones(T, T, dtype=values.dtype, device=values.device).triu()


def log_likelihood_per_cell(current: Distribution, rows: TaskRows) -> Tensor:
    """Return -(1 / E T) Σ_{e,t} log π_θ(a|o) A, for every task: [b]. log_likelihood_loss at the scale of dice_loss."""
    episodes = _episodes_of(rows)
    return -episodes.mean_over_cells(episodes.split(current.log_prob(rows.actions) * rows.advantages))


def _episodes_of(rows: TaskRows) -> EpisodeRows:
    if rows.episodes is None:
        raise ValueError(
            "found samples without adjusted rewards; required those of processing.name=dice, which the DiCE loss is "
            "made of"
        )
    return rows.episodes

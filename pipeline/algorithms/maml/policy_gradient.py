"""Learners for MAML-VPG, MAML-PPO, DICE-MAML and VPG-DICE, with their losses and E-MAML's exploration credit."""

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from metaloom.pipeline.algorithms.contract import Setup, Steps
from metaloom.pipeline.algorithms.maml.learner import MetaLearner
from metaloom.pipeline.algorithms.maml.meta_gradient import (
    INNER_LOSSES,
    LOSS,
    InnerLoss,
    Objective,
    clipped_loss,
    likelihood_ratio_loss,
    log_likelihood_loss,
    policy_kls,
)
from metaloom.pipeline.algorithms.maml.rows import Chunk, EpisodeRows, TaskRows
from metaloom.pipeline.algorithms.maml.settings import MAMLPPO, MAMLVPG, DiceMAML, Exploration, VPGDice
from metaloom.pipeline.nn.distributions import Distribution
from metaloom.pipeline.types import Array, LearnerState


def with_exploration(objective: Objective, settings: Exploration, steps: Steps) -> Objective:
    """Return the objective with -credit Σ_k mean(log π_{θ^k}(a|o)) added to its loss, if the settings enable it.

    This term of E-MAML credits exploration before adaptation. Stadie et al. 2018, arXiv:1803.01118.
    """
    if not settings.exploration:
        return objective
    credit = exploration_credit(steps)
    if settings.e_maml_scale == "sum":
        credit = credit * steps[-1].samples.mask.shape[1]
    num_rounds = len(steps) - 1 if settings.exploration_rounds == "all" else 1

    def credited(current: Sequence[Distribution], chunk: Chunk) -> dict[str, Tensor]:
        values = objective(current, chunk)
        pairs = list(zip(current, chunk.rounds, strict=True))[:num_rounds]
        log_likelihood = sum(rows.mean(now.log_prob(rows.actions)) for now, rows in pairs)
        of_chunk = credit[chunk.first_task : chunk.first_task + len(chunk)]
        return values | {LOSS: values[LOSS] - values[LOSS].new_tensor(of_chunk) * log_likelihood}

    return credited


def exploration_credit(steps: Steps) -> Array:
    """Return each task's mean reward after adaptation, [B], with rewards standardized over the steps of all tasks."""
    rewards, mask = steps[-1].episodes.rewards.astype(np.float64), steps[-1].samples.mask
    real = rewards[mask == 1]
    standardized = (rewards - real.mean()) / (real.std() + 1e-8)
    return (standardized * mask).sum((1, 2)) / mask.sum((1, 2))


class MAMLVPGLearner(MetaLearner):
    """Learner for MAML-VPG: the log-likelihood loss after adaptation, with exploration credit if enabled."""

    def __init__(self, settings: MAMLVPG, setup: Setup) -> None:
        super().__init__(settings, setup, INNER_LOSSES[settings.inner_loss])
        self._settings = settings

    def objective(self, state: LearnerState, steps: Steps) -> Objective:
        return with_exploration(partial(_with_kls, loss=log_likelihood_loss), self._settings, steps)


def dice_loss(current: Distribution, rows: TaskRows) -> Tensor:
    """Return the DiCE loss -(1 / E T) Σ_{e,t} ☐_t c_t per task, [b], where c are the adjusted rewards.

    Foerster et al. 2018, arXiv:1802.05098, with ☐_t = exp(τ_t - ⊥τ_t) and τ_t = Σ_{t' ≤ t} log π_θ(a_t'|o_t'). ☐ is 1,
    so the value does not depend on θ, but its derivatives of every order estimate those of the expected return.
    """
    episodes = _episodes_of(rows)
    log_prob = sums_over_time(episodes.split(current.log_prob(rows.actions)))
    magic_box = (log_prob - log_prob.detach()).exp()
    return -episodes.mean_over_cells(magic_box * episodes.adjusted_rewards)


def sums_over_time(values: Tensor) -> Tensor:
    """Return cumulative sums Σ_{t' ≤ t} of values [..., T]."""
    # cumsum is not deterministic on a GPU. On the CPU, a product would change the last bits of stored runs.
    return values.cumsum(-1) if values.device.type == "cpu" else sums_by_product(values)


def sums_by_product(values: Tensor) -> Tensor:
    """Return cumulative sums Σ_{t' ≤ t} of values [..., T], computed as a product with a triangular matrix."""
    T = values.shape[-1]
    return values @ torch.ones(T, T, dtype=values.dtype, device=values.device).triu()


def log_likelihood_per_cell(current: Distribution, rows: TaskRows) -> Tensor:
    """Return -(1 / E T) Σ_{e,t} log π_θ(a|o) A per task, [b]: log_likelihood_loss, rescaled to match dice_loss."""
    episodes = _episodes_of(rows)
    return -episodes.mean_over_cells(episodes.split(current.log_prob(rows.actions) * rows.advantages))


def _episodes_of(rows: TaskRows) -> EpisodeRows:
    if rows.episodes is None:
        raise ValueError("the samples have no adjusted rewards, which the DiCE loss requires; use processing.name=dice")
    return rows.episodes


class DiceLearner(MetaLearner):
    """Learner for DICE-MAML and VPG-DICE: the DiCE loss during adaptation and, in DICE-MAML, after it."""

    def __init__(self, settings: DiceMAML | VPGDice, setup: Setup) -> None:
        super().__init__(settings, setup, dice_loss)
        self._outer_loss = log_likelihood_per_cell if isinstance(settings, VPGDice) else dice_loss

    def objective(self, state: LearnerState, steps: Steps) -> Objective:
        return partial(_with_kls, loss=self._outer_loss)


def _with_kls(current: Sequence[Distribution], chunk: Chunk, loss: InnerLoss) -> dict[str, Tensor]:
    return {LOSS: loss(current[-1], chunk.rounds[-1]), **policy_kls(current, chunk)}


class MAMLPPOLearner(MetaLearner):
    """Learner for MAML-PPO: likelihood-ratio inner steps, clipped if enabled, and a clipped surrogate after them."""

    def __init__(self, settings: MAMLPPO, setup: Setup) -> None:
        clip_eps = self._clip_eps = settings.clip_eps

        def clipped(current: Distribution, rows: TaskRows) -> Tensor:
            return clipped_loss(current, rows, clip_eps)[0]

        super().__init__(settings, setup, clipped if settings.inner_loss == "clipped" else likelihood_ratio_loss)

    def objective(self, state: LearnerState, steps: Steps) -> Objective:
        def objective(current: Sequence[Distribution], chunk: Chunk) -> dict[str, Tensor]:
            loss, clipped = clipped_loss(current[-1], chunk.rounds[-1], self._clip_eps)
            return {LOSS: loss, **policy_kls(current, chunk), "clip_fraction": clipped}

        return objective

"""MAML with other losses after adaptation: the policy gradient, PPO's clipped surrogate, and the DiCE estimator."""

from collections.abc import Sequence
from functools import partial

import numpy as np
from torch import Tensor

from metaloom.pipeline.algorithms.contract import Setup
from metaloom.pipeline.algorithms.maml.adam import AdamEpochs
from metaloom.pipeline.algorithms.maml.learner import MetaLearner
from metaloom.pipeline.algorithms.maml.losses import (
    INNER_LOSSES,
    LOSS,
    clip_fraction,
    dice_loss,
    likelihood_ratio_loss,
    log_likelihood_loss,
    log_likelihood_per_cell,
    policy_kls,
    ratios,
)
from metaloom.pipeline.algorithms.maml.meta_gradient import InnerLoss, Objective
from metaloom.pipeline.algorithms.maml.rows import Chunk, TaskRows
from metaloom.pipeline.algorithms.maml.settings import MAMLPPO, MAMLVPG, DiceMAML, Exploration, VPGDice
from metaloom.pipeline.nn.distributions import Distribution, clipped_surrogate
from metaloom.pipeline.types import Array, LearnerState, Step


def with_exploration(objective: Objective, settings: Exploration, steps: Sequence[Step]) -> Objective:
    """Return the objective with -credit Σ_k mean(log π_{θ^k}(a|o)) added to its loss, if the settings enable it.

    Credit for exploring before adaptation: the term of E-MAML. Stadie et al. 2018, arXiv:1803.01118.
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


def exploration_credit(steps: Sequence[Step]) -> Array:
    """Return how well every task went after adaptation, relative to the others: [B].

    The mean over a task's real steps of rewards with zero mean and unit standard deviation over all tasks.
    """
    rewards, mask = steps[-1].episodes.rewards.astype(np.float64), steps[-1].samples.mask
    real = rewards[mask == 1]
    standardized = (rewards - real.mean()) / (real.std() + 1e-8)
    return (standardized * mask).sum((1, 2)) / mask.sum((1, 2))


class MAMLVPGLearner(MetaLearner):
    """The log-likelihood loss after adaptation, for any inner loss, and credit for exploration when it is on.

    Finn et al. 2017, arXiv:1703.03400, algorithm 3.
    """

    def __init__(self, settings: MAMLVPG, setup: Setup) -> None:
        super().__init__(settings, setup, INNER_LOSSES[settings.inner_loss], AdamEpochs(settings))
        self._settings = settings

    def objective(self, state: LearnerState, steps: Sequence[Step]) -> Objective:
        return with_exploration(partial(_with_kls, loss=log_likelihood_loss), self._settings, steps)


class DiceLearner(MetaLearner):
    """The DiCE loss in the adaptation; after it the same, or for VPG-DICE the policy gradient's.

    Foerster et al. 2018, arXiv:1802.05098; as meta-learning methods in Rothfuss et al. 2019, arXiv:1810.06784.
    """

    def __init__(self, settings: DiceMAML | VPGDice, setup: Setup) -> None:
        super().__init__(settings, setup, dice_loss, AdamEpochs(settings))
        self._outer_loss = log_likelihood_per_cell if isinstance(settings, VPGDice) else dice_loss

    def objective(self, state: LearnerState, steps: Sequence[Step]) -> Objective:
        return partial(_with_kls, loss=self._outer_loss)


def _with_kls(current: Sequence[Distribution], chunk: Chunk, loss: InnerLoss) -> dict[str, Tensor]:
    return {LOSS: loss(current[-1], chunk.rounds[-1]), **policy_kls(current, chunk)}


class MAMLPPOLearner(MetaLearner):
    """Likelihood-ratio inner steps, clipped if enabled, and the clipped surrogate after them.

    PPO, Schulman et al. 2017, arXiv:1707.06347, as garage offers it.
    """

    def __init__(self, settings: MAMLPPO, setup: Setup) -> None:
        clipped = partial(_clipped, clip_eps=settings.clip_eps)
        inner_loss = clipped if settings.inner_loss == "clipped" else likelihood_ratio_loss
        super().__init__(settings, setup, inner_loss, AdamEpochs(settings))
        self._clip_eps = settings.clip_eps

    def objective(self, state: LearnerState, steps: Sequence[Step]) -> Objective:
        return partial(_objective, clip_eps=self._clip_eps)


def _clipped(current: Distribution, rows: TaskRows, clip_eps: float) -> Tensor:
    return -rows.mean(clipped_surrogate(ratios(current, rows), rows.advantages, clip_eps))


def _objective(current: Sequence[Distribution], chunk: Chunk, clip_eps: float) -> dict[str, Tensor]:
    rows = chunk.rounds[-1]
    ratio = ratios(current[-1], rows)
    return {
        LOSS: -rows.mean(clipped_surrogate(ratio, rows.advantages, clip_eps)),
        **policy_kls(current, chunk),
        "clip_fraction": clip_fraction(ratio, rows, clip_eps),
    }

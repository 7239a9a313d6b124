"""VPG-DICE: adaptation by the DiCE estimator, meta-update by the vanilla policy gradient.

Rothfuss et al. 2019, arXiv:1810.06784, section 7.3, compare it with the other estimators of the meta-gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from metaloom.pipeline.algorithms.maml.adam_update import AdamUpdate
from metaloom.pipeline.algorithms.maml.losses import dice_loss, log_likelihood_per_cell, policy_kls
from metaloom.pipeline.nn.distributions import DiagGaussian
from metaloom.pipeline.types import LearnerState, Step

if TYPE_CHECKING:
    from torch import Tensor

    from metaloom.pipeline.algorithms.maml.meta_gradient import Objective
    from metaloom.pipeline.algorithms.maml.rows import Chunk, TaskRows


class VPGDice(AdamUpdate):
    """The DiCE loss in the adaptation, log-likelihood times advantage after it."""

    name: Literal["vpg-dice"] = "vpg-dice"

    learns_from: ClassVar[tuple[str, ...]] = ("adjusted_rewards", "advantages")
    """Fields of Samples in the losses."""

    def adaptation_loss(self, current: DiagGaussian, rows: TaskRows) -> Tensor:
        """The DiCE loss of every task: [b]."""
        return dice_loss(current, rows)

    def objective(self, learner: LearnerState, steps: Sequence[Step]) -> Objective:
        """The log-likelihood loss after adaptation."""
        del learner, steps

        def objective(current: Sequence[DiagGaussian], chunk: Chunk) -> dict[str, Tensor]:
            loss = log_likelihood_per_cell(current[-1], chunk.rounds[-1])
            return {"loss": loss, **policy_kls(current, chunk.rounds)}

        return objective

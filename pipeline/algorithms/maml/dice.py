"""DICE-MAML: adaptation and meta-update by the DiCE estimator.

Foerster et al. 2018, arXiv:1802.05098; as a meta-learning method in Rothfuss et al. 2019, arXiv:1810.06784.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import model_validator

from metaloom.pipeline.algorithms.maml.adam_update import AdamUpdate
from metaloom.pipeline.algorithms.maml.losses import dice_loss, policy_kls
from metaloom.pipeline.nn.distributions import DiagGaussian
from metaloom.pipeline.types import LearnerState, Step

if TYPE_CHECKING:
    from torch import Tensor

    from metaloom.pipeline.algorithms.maml.meta_gradient import Objective
    from metaloom.pipeline.algorithms.maml.rows import Chunk, TaskRows


class DiceMAML(AdamUpdate):
    """The DiCE loss before and after adaptation, on discounted rewards minus a baseline of theirs.

    Unbiased meta-gradients of high variance: it wants several times the episodes of the other algorithms.
    """

    name: Literal["dice-maml"] = "dice-maml"

    learns_from: ClassVar[tuple[str, ...]] = ("adjusted_rewards",)
    """Fields of Samples in the losses."""

    @model_validator(mode="after")
    def _no_tolerance(self) -> DiceMAML:
        if self.tolerance is not None:
            raise ValueError(
                f"tolerance is {self.tolerance} but the value of the DiCE loss is the same for all parameters, unlike "
                "its derivatives; leave tolerance out"
            )
        return self

    def adaptation_loss(self, current: DiagGaussian, rows: TaskRows) -> Tensor:
        """The DiCE loss of every task: [b]."""
        return dice_loss(current, rows)

    def objective(self, learner: LearnerState, steps: Sequence[Step]) -> Objective:
        """The DiCE loss after adaptation."""
        del learner, steps

        def objective(current: Sequence[DiagGaussian], chunk: Chunk) -> dict[str, Tensor]:
            return {"loss": dice_loss(current[-1], chunk.rounds[-1]), **policy_kls(current, chunk.rounds)}

        return objective

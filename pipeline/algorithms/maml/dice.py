"""DICE-MAML: adaptation and meta-update by the DiCE estimator; VPG-DICE: the policy gradient in the meta-update.

Foerster et al. 2018, arXiv:1802.05098; as meta-learning methods in Rothfuss et al. 2019, arXiv:1810.06784.
"""

from collections.abc import Sequence

from torch import Tensor

from metaloom.pipeline.algorithms.contract import Setup
from metaloom.pipeline.algorithms.maml.adam import AdamEpochs
from metaloom.pipeline.algorithms.maml.learner import MetaLearner
from metaloom.pipeline.algorithms.maml.losses import LOSS, dice_loss, log_likelihood_per_cell, policy_kls
from metaloom.pipeline.algorithms.maml.meta_gradient import Objective
from metaloom.pipeline.algorithms.maml.rows import Chunk
from metaloom.pipeline.algorithms.maml.settings import DiceMAML, VPGDice
from metaloom.pipeline.nn.distributions import Distribution
from metaloom.pipeline.types import LearnerState, Step


class DiceLearner(MetaLearner):
    """The DiCE loss in the adaptation."""

    def __init__(self, settings: DiceMAML | VPGDice, setup: Setup) -> None:
        super().__init__(settings, setup, dice_loss, AdamEpochs(settings))
        self._outer_loss = log_likelihood_per_cell if isinstance(settings, VPGDice) else dice_loss

    def objective(self, state: LearnerState, steps: Sequence[Step]) -> Objective:
        """The loss after adaptation; see MetaLearner."""

        def objective(current: Sequence[Distribution], chunk: Chunk) -> dict[str, Tensor]:
            return {LOSS: self._outer_loss(current[-1], chunk.rounds[-1]), **policy_kls(current, chunk)}

        return objective

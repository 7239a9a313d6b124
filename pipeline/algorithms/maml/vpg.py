"""MAML-VPG: MAML with a plain policy gradient after adaptation. Finn et al. 2017, arXiv:1703.03400, algorithm 3."""

from collections.abc import Sequence

from torch import Tensor

from metaloom.pipeline.algorithms.contract import Setup
from metaloom.pipeline.algorithms.maml.adam import AdamEpochs
from metaloom.pipeline.algorithms.maml.exploration import with_exploration
from metaloom.pipeline.algorithms.maml.learner import MetaLearner
from metaloom.pipeline.algorithms.maml.losses import INNER_LOSSES, LOSS, log_likelihood_loss, policy_kls
from metaloom.pipeline.algorithms.maml.meta_gradient import Objective
from metaloom.pipeline.algorithms.maml.rows import Chunk
from metaloom.pipeline.algorithms.maml.settings import MAMLVPG
from metaloom.pipeline.nn.distributions import Distribution
from metaloom.pipeline.types import LearnerState, Step


class MAMLVPGLearner(MetaLearner):
    """The log-likelihood loss after adaptation, whatever the inner loss, and credit for exploration when it is on."""

    def __init__(self, settings: MAMLVPG, setup: Setup) -> None:
        inner_loss = INNER_LOSSES[settings.inner_loss]
        super().__init__(settings, setup, inner_loss, AdamEpochs(settings))
        self._settings = settings

    def objective(self, state: LearnerState, steps: Sequence[Step]) -> Objective:
        return with_exploration(_policy_gradient, self._settings, steps)


def _policy_gradient(current: Sequence[Distribution], chunk: Chunk) -> dict[str, Tensor]:
    return {LOSS: log_likelihood_loss(current[-1], chunk.rounds[-1]), **policy_kls(current, chunk)}

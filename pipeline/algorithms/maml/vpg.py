"""MAML-VPG: MAML with a plain policy gradient after adaptation. Finn et al. 2017, arXiv:1703.03400, algorithm 3."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from metaloom.pipeline.algorithms.maml.adam_update import AdamUpdate
from metaloom.pipeline.algorithms.maml.losses import log_likelihood_loss
from metaloom.pipeline.algorithms.maml.maml import MAML
from metaloom.pipeline.nn.distributions import DiagGaussian

if TYPE_CHECKING:
    from torch import Tensor

    from metaloom.pipeline.algorithms.maml.rows import TaskRows


class MAMLVPG(AdamUpdate, MAML):
    """Policy-gradient inner steps, and Adam on the policy gradient after them.

    Defaults are those of the ProMP authors' experiments.
    """

    name: Literal["maml-vpg"] = "maml-vpg"

    def surrogate(self, adapted: DiagGaussian, rows: TaskRows) -> Tensor:
        """The log-likelihood loss after adaptation, whatever the inner loss, for every task: [b]."""
        return log_likelihood_loss(adapted, rows)

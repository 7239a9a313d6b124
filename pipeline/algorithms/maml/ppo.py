"""MAML-PPO: MAML with the clipped surrogate of PPO (Schulman et al. 2017, arXiv:1707.06347), as garage offers it."""

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from metaloom.pipeline.algorithms.contract import Setup
from metaloom.pipeline.algorithms.maml.adam import AdamEpochs
from metaloom.pipeline.algorithms.maml.learner import MetaLearner
from metaloom.pipeline.algorithms.maml.losses import (
    LOSS,
    clip_fraction,
    clipped_surrogate,
    likelihood_ratio_loss,
    policy_kls,
    ratios,
)
from metaloom.pipeline.algorithms.maml.meta_gradient import Objective
from metaloom.pipeline.algorithms.maml.rows import Chunk, TaskRows
from metaloom.pipeline.algorithms.maml.settings import MAMLPPO
from metaloom.pipeline.nn.distributions import Distribution
from metaloom.pipeline.types import LearnerState, Step


class MAMLPPOLearner(MetaLearner):
    """Likelihood-ratio inner steps, clipped ones where that is asked for, and the clipped surrogate after them."""

    def __init__(self, settings: MAMLPPO, setup: Setup) -> None:
        clipped = partial(_clipped, clip_eps=settings.clip_eps)
        inner_loss = clipped if settings.inner_loss == "clipped" else likelihood_ratio_loss
        super().__init__(settings, setup, inner_loss, AdamEpochs(settings))
        self._clip_eps = settings.clip_eps

    def objective(self, state: LearnerState, steps: Sequence[Step]) -> Objective:
        """The clipped surrogate after adaptation, and what describes it; see MetaLearner."""
        return partial(_objective, clip_eps=self._clip_eps)


def _clipped(current: Distribution, rows: TaskRows, clip_eps: float) -> Tensor:
    return clipped_surrogate(ratios(current, rows), rows, clip_eps)


def _objective(current: Sequence[Distribution], chunk: Chunk, clip_eps: float) -> dict[str, Tensor]:
    rows = chunk.rounds[-1]
    ratio = ratios(current[-1], rows)
    return {
        LOSS: clipped_surrogate(ratio, rows, clip_eps),
        **policy_kls(current, chunk),
        "clip_fraction": clip_fraction(ratio, rows, clip_eps),
    }

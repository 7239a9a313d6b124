"""What MAML-TRPO, MAML-VPG and E-MAML share: the inner loss, and credit for exploring before adaptation."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import field_validator, model_validator

from metaloom.pipeline.algorithms.maml.gradient_based import GradientBased
from metaloom.pipeline.algorithms.maml.losses import likelihood_ratio_loss, log_likelihood_loss, policy_kls
from metaloom.pipeline.nn.distributions import DiagGaussian
from metaloom.pipeline.types import Array, LearnerState, Step

if TYPE_CHECKING:
    from torch import Tensor

    from metaloom.pipeline.algorithms.maml.meta_gradient import Objective
    from metaloom.pipeline.algorithms.maml.rows import Chunk, TaskRows


class MAML(GradientBased):
    """Model-agnostic meta-learning. Finn et al. 2017, arXiv:1703.03400."""

    inner_loss: Literal["log_likelihood", "likelihood_ratio"] = "log_likelihood"
    """What the inner steps minimize: -mean(A log π), or -mean(r A), whose second derivative has one term more."""
    exploration: bool = False
    """Credit the policies before adaptation for the rewards after it (E-MAML, Stadie et al. 2018)."""
    e_maml_scale: Literal["mean", "sum"] = "mean"
    """Scale of the credit: a mean over steps, or that times the episodes per task."""
    exploration_rounds: Literal["all", "first"] = "all"
    """Rounds that get the credit: all before the last, or the first only, as in the ProMP code."""

    @field_validator("inner_loss", mode="before")
    @classmethod
    def _dice_has_algorithms_of_its_own(cls, value: Any) -> Any:
        if value == "dice":
            raise ValueError(
                "the DiCE loss is not offered here: it needs samples of its own, and its high variance does not go "
                "with a trust region, for its authors neither; use the algorithms dice-maml or vpg-dice"
            )
        return value

    @model_validator(mode="after")
    def _exploration_settings_agree(self) -> MAML:
        if self.exploration and self.inner_steps == 0:
            raise ValueError("exploration is on but inner_steps is 0, so no round comes before adaptation; turn it off")
        for name, default in (("e_maml_scale", "mean"), ("exploration_rounds", "all")):
            if not self.exploration and getattr(self, name) != default:
                raise ValueError(f"{name} is {getattr(self, name)} but exploration is off; turn it on or leave it out")
        return self

    @abstractmethod
    def surrogate(self, adapted: DiagGaussian, rows: TaskRows) -> Tensor:
        """The loss after adaptation, for every task: [b]."""

    def adaptation_loss(self, current: DiagGaussian, rows: TaskRows) -> Tensor:
        """The inner loss of every task: [b]."""
        loss = log_likelihood_loss if self.inner_loss == "log_likelihood" else likelihood_ratio_loss
        return loss(current, rows)

    def objective(self, learner: LearnerState, steps: Sequence[Step]) -> Objective:
        """The surrogate, the exploration term when it is on, and the KLs."""
        del learner
        credit = self.exploration_credit(steps) if self.exploration else None

        def objective(current: Sequence[DiagGaussian], chunk: Chunk) -> dict[str, Tensor]:
            loss = self.surrogate(current[-1], chunk.rounds[-1])
            if credit is not None:
                loss = loss + self.exploration_loss(current, chunk, credit)
            return {"loss": loss, **policy_kls(current, chunk.rounds)}

        return objective

    def exploration_credit(self, steps: Sequence[Step]) -> Array:
        """How well every task went after adaptation, relative to the others: [B].

        The mean over a task's real steps of rewards with zero mean and unit standard deviation over all tasks; with
        e_maml_scale=sum, that times the episodes per task.
        """
        episodes, mask = steps[-1].episodes, steps[-1].samples.mask
        rewards = episodes.rewards.astype(np.float64)
        real = rewards[mask == 1]
        standardized = (rewards - real.mean()) / (real.std() + 1e-8)
        credit = (standardized * mask).sum((1, 2)) / mask.sum((1, 2))
        return credit * mask.shape[1] if self.e_maml_scale == "sum" else credit

    def exploration_loss(self, current: Sequence[DiagGaussian], chunk: Chunk, credit: Array) -> Tensor:
        """-credit Σ_k mean(log π_{θ^k}(a|o)) over rounds before the last, for every task: [b]."""
        num_rounds = len(chunk.rounds) - 1 if self.exploration_rounds == "all" else 1
        pairs = list(zip(current, chunk.rounds, strict=True))[:num_rounds]
        log_likelihood = sum(rows.mean(now.log_prob(rows.actions)) for now, rows in pairs)
        weights = chunk.rounds[0].weights
        return -weights.new_tensor(credit[chunk.first_task : chunk.first_task + len(chunk)]) * log_likelihood

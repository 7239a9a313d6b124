"""MAML-PPO: MAML with the clipped surrogate of PPO (Schulman et al. 2017, arXiv:1707.06347), as garage offers it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from metaloom.pipeline.algorithms.maml.adam_update import AdamUpdate
from metaloom.pipeline.algorithms.maml.losses import clipped_surrogate, policy_kls
from metaloom.pipeline.nn.distributions import DiagGaussian, likelihood_ratio
from metaloom.pipeline.types import LearnerState, Step

if TYPE_CHECKING:
    from torch import Tensor

    from metaloom.pipeline.algorithms.maml.meta_gradient import Objective
    from metaloom.pipeline.algorithms.maml.rows import Chunk, TaskRows


class MAMLPPO(AdamUpdate):
    """The clipped surrogate before and after adaptation, each relative to the policy that acted in its round.

    garage's comparison policy is an alias of the current one, so that its ratio is always 1 and it never clips. Here
    the ratios leave 1 as soon as an iteration takes a second Adam step.
    """

    name: Literal["maml-ppo"] = "maml-ppo"

    clip_eps: float = Field(default=0.5, gt=0)
    """Clipping range ε of the likelihood ratios."""
    num_epochs: int = Field(default=5, ge=1)
    """Passes over the samples of an iteration; in the first step nothing is clipped yet."""

    def adaptation_loss(self, current: DiagGaussian, rows: TaskRows) -> Tensor:
        """The clipped surrogate of every task: [b]."""
        ratio = likelihood_ratio(current.log_prob(rows.actions), rows.behavior_log_prob)
        return clipped_surrogate(ratio, rows, self.clip_eps)

    def objective(self, learner: LearnerState, steps: Sequence[Step]) -> Objective:
        """The clipped surrogate after adaptation, and what describes it."""
        del learner, steps

        def objective(current: Sequence[DiagGaussian], chunk: Chunk) -> dict[str, Tensor]:
            rows = chunk.rounds[-1]
            ratio = likelihood_ratio(current[-1].log_prob(rows.actions), rows.behavior_log_prob)
            outside = (ratio.detach() - 1).abs() > self.clip_eps
            return {
                "loss": clipped_surrogate(ratio, rows, self.clip_eps),
                **policy_kls(current, chunk.rounds),
                "clip_fraction": rows.mean(outside.to(ratio.dtype)),
            }

        return objective

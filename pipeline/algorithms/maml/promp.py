"""Proximal meta-policy search (ProMP). Rothfuss et al. 2019, arXiv:1810.06784."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal

import numpy as np
from pydantic import Field, model_validator

from metaloom.pipeline.algorithms.maml.adam_update import AdamUpdate
from metaloom.pipeline.algorithms.maml.gradient_based import NUM_UPDATES, inner_kls
from metaloom.pipeline.algorithms.maml.losses import INNER_KL, clipped_surrogate, likelihood_ratio_loss
from metaloom.pipeline.nn.distributions import DiagGaussian, likelihood_ratio
from metaloom.pipeline.types import Array, LearnerState, Metrics, Params, Step

if TYPE_CHECKING:
    from torch import Tensor

    from metaloom.pipeline.algorithms.maml.meta_gradient import Objective, TaskValues
    from metaloom.pipeline.algorithms.maml.rows import TaskRows
    from metaloom.pipeline.policies.gaussian import GaussianPolicy

DEFAULT_TARGET_INNER_KL = 0.01
MIN_INNER_KL_PENALTY = 1e-6
MAX_INNER_KL_PENALTY = 1e2
INNER_KL_COEFF = "inner_kl_coeff"


class ProMP(AdamUpdate):
    """ProMP: clipped surrogate after adaptation, likelihood-ratio inner steps, KL penalty before adaptation.

    Defaults are those of the authors' run scripts.
    """

    name: Literal["promp"] = "promp"

    clip_eps: float = Field(default=0.3, gt=0)
    """Clipping range ε of the post-update likelihood ratio."""
    anneal_factor: float = Field(default=1.0, gt=0, le=1)
    """Multiplies clip_eps after every iteration: ε_i = clip_eps * anneal_factor**i."""
    num_epochs: int = Field(default=5, ge=1)
    """Passes over the samples of an iteration."""

    init_inner_kl_penalty: float = Field(default=5e-4, ge=0)
    """Initial coefficient η of the KL between the policy that sampled a round and its current version."""
    adaptive_inner_kl_penalty: bool = False
    """Halve or double η of an inner step when its KL leaves [target / 1.5, 1.5 target]."""
    target_inner_kl: float = Field(default=DEFAULT_TARGET_INNER_KL, gt=0)
    """KL that the adaptive rule aims at, in nats."""

    @model_validator(mode="after")
    def _kl_settings_agree(self) -> ProMP:
        if self.adaptive_inner_kl_penalty and self.inner_steps == 0:
            raise ValueError(
                "adaptive_inner_kl_penalty is on but inner_steps is 0, so no inner step has a KL; turn it off"
            )
        if self.adaptive_inner_kl_penalty and self.init_inner_kl_penalty == 0:
            raise ValueError("adaptive_inner_kl_penalty is on but init_inner_kl_penalty is 0; start above 0")
        if not self.adaptive_inner_kl_penalty and self.target_inner_kl != DEFAULT_TARGET_INNER_KL:
            raise ValueError(
                f"target_inner_kl is {self.target_inner_kl} but adaptive_inner_kl_penalty is off; "
                "turn it on or leave target_inner_kl out"
            )
        return self

    def initialize(self, policy: GaussianPolicy, *, run_seed: int) -> LearnerState:
        """The learner before the first iteration."""
        learner = super().initialize(policy, run_seed=run_seed)
        coeffs = np.full(self.inner_steps, self.init_inner_kl_penalty)
        return LearnerState(learner.params, learner.optimizer, learner.extra | {INNER_KL_COEFF: coeffs})

    def adaptation_loss(self, current: DiagGaussian, rows: TaskRows) -> Tensor:
        """The likelihood-ratio loss of every task: [b]."""
        return likelihood_ratio_loss(current, rows)

    def outer_loss(
        self,
        current: Sequence[DiagGaussian],
        rounds: Sequence[TaskRows],
        *,
        clip_eps: float,
        kl_coeffs: Sequence[float],
    ) -> dict[str, Tensor]:
        """Clipped surrogate after adaptation plus (1/K) Σ_k η_k KL_k before it, and what describes them.

        Args:
            current: the policy after k inner steps on the rows of round k, for k = 0 ... K.
            rounds: rows of these rounds.
            clip_eps: ε.
            kl_coeffs: η of each inner step.

        Returns:
            `loss`, `inner_kl_k`, `outer_kl` and `clip_fraction`, each [b].
        """
        rows, adapted = rounds[-1], current[-1]
        ratio = likelihood_ratio(adapted.log_prob(rows.actions), rows.behavior_log_prob)
        loss = clipped_surrogate(ratio, rows, clip_eps)
        inner_kls = [step.mean(step.behavior.kl(now)) for step, now in zip(rounds[:-1], current[:-1], strict=True)]
        for coeff, kl in zip(kl_coeffs, inner_kls, strict=True):
            loss = loss + coeff / len(inner_kls) * kl
        outside = (ratio.detach() - 1).abs() > clip_eps
        return {
            "loss": loss,
            **{f"{INNER_KL}{k}": kl for k, kl in enumerate(inner_kls)},
            "outer_kl": rows.mean(rows.behavior.kl(DiagGaussian(adapted.mean.detach(), adapted.log_std.detach()))),
            "clip_fraction": rows.mean(outside.to(ratio.dtype)),
        }

    def clip_eps_now(self, learner: LearnerState) -> float:
        """ε of this iteration, annealed. The reference accepts anneal_factor but never applies it."""
        return self.clip_eps * self.anneal_factor ** int(learner.extra[NUM_UPDATES])

    def objective(self, learner: LearnerState, steps: Sequence[Step]) -> Objective:
        """The meta-loss with this iteration's ε and η."""
        del steps
        kl_coeffs = learner.extra[INNER_KL_COEFF].tolist()
        loss = partial(self.outer_loss, clip_eps=self.clip_eps_now(learner), kl_coeffs=kl_coeffs)
        return lambda current, chunk: loss(current, chunk.rounds)

    def update_metrics(
        self, learner: LearnerState, meta_params: Mapping[str, Array], before: TaskValues, after: TaskValues
    ) -> Metrics:
        """What the update was like."""
        metrics = super().update_metrics(learner, meta_params, before, after)
        metrics["clip_eps"] = self.clip_eps_now(learner)
        if self.inner_steps:
            metrics["inner_kl_coeff"] = float(np.mean(learner.extra[INNER_KL_COEFF]))
        return metrics

    def next_learner(
        self, learner: LearnerState, meta_params: Mapping[str, Array], optimizer: Params, after: TaskValues
    ) -> LearnerState:
        """The learner of the next iteration, with the η that the adaptive rule gives."""
        updated = super().next_learner(learner, meta_params, optimizer, after)
        if self.adaptive_inner_kl_penalty:
            pairs = zip(learner.extra[INNER_KL_COEFF].tolist(), inner_kls(after), strict=True)
            coeffs = [adapted_kl_coeff(c, kl, self.target_inner_kl) for c, kl in pairs]
            updated.extra[INNER_KL_COEFF] = np.array(coeffs)
        return updated


def adapted_kl_coeff(coeff: float, kl: float, target: float) -> float:
    """η after the adaptive rule: halved below target / 1.5, doubled above 1.5 target, within [1e-6, 1e2].

    Without the bounds, which the reference lacks, a KL that stays on one side drives η to 0 or infinity.
    """
    if kl < target / 1.5:
        coeff /= 2
    elif kl > target * 1.5:
        coeff *= 2
    return min(max(coeff, MIN_INNER_KL_PENALTY), MAX_INNER_KL_PENALTY)

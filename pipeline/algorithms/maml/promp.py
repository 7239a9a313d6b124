"""Proximal meta-policy search (ProMP). Rothfuss et al. 2019, arXiv:1810.06784."""

from collections.abc import Sequence
from functools import partial

import numpy as np
from torch import Tensor

from metaloom.pipeline.algorithms.contract import NUM_UPDATES, Setup, Steps
from metaloom.pipeline.algorithms.maml.learner import MetaLearner, mean_over_tasks
from metaloom.pipeline.algorithms.maml.meta_gradient import (
    INNER_KL,
    LOSS,
    OUTER_KL,
    Objective,
    TaskValues,
    clipped_loss,
    likelihood_ratio_loss,
)
from metaloom.pipeline.algorithms.maml.rows import Chunk
from metaloom.pipeline.algorithms.maml.settings import ProMP
from metaloom.pipeline.nn.distributions import Distribution
from metaloom.pipeline.types import LearnerState, Metrics, Params

MIN_INNER_KL_PENALTY = 1e-6
MAX_INNER_KL_PENALTY = 1e2
INNER_KL_COEFF = "inner_kl_coeff"  # key in LearnerState.extra for the coefficients η of the inner steps, [K] float64


class ProMPLearner(MetaLearner):
    """Learner for ProMP: likelihood-ratio inner steps, a clipped surrogate after them, and a KL penalty before them."""

    def __init__(self, settings: ProMP, setup: Setup) -> None:
        super().__init__(settings, setup, likelihood_ratio_loss)
        self._settings = settings

    def initialize(self, *, run_seed: int) -> LearnerState:
        state = super().initialize(run_seed=run_seed)
        coeffs = np.full(self._settings.inner_steps, self._settings.init_inner_kl_penalty)
        return LearnerState(state.params, state.optimizer, state.extra | {INNER_KL_COEFF: coeffs})

    def objective(self, state: LearnerState, steps: Steps) -> Objective:
        coeffs = state.extra[INNER_KL_COEFF].tolist()
        return partial(promp_objective, clip_eps=self._clip_eps(state), kl_coeffs=coeffs)

    def concluded(self, state: LearnerState, after: TaskValues) -> tuple[Params, Metrics]:
        """Return the next η if it is adaptive, and the current ε and mean η as metrics."""
        coeffs, extra, metrics = state.extra[INNER_KL_COEFF], Params(), {"clip_eps": self._clip_eps(state)}
        if self._settings.adaptive_inner_kl_penalty:
            target = self._settings.target_inner_kl
            kls = [mean_over_tasks(after[f"{INNER_KL}{k}"]) for k in range(len(coeffs))]
            pairs = zip(coeffs.tolist(), kls, strict=True)
            extra[INNER_KL_COEFF] = np.array([adapted_kl_coeff(coeff, kl, target) for coeff, kl in pairs])
        if self._settings.inner_steps:
            metrics["inner_kl_coeff"] = float(np.mean(coeffs))
        return extra, metrics

    def _clip_eps(self, state: LearnerState) -> float:
        # The reference accepts anneal_factor but never applies it.
        return self._settings.clip_eps * self._settings.anneal_factor ** int(state.extra[NUM_UPDATES])


def promp_objective(
    current: Sequence[Distribution], chunk: Chunk, *, clip_eps: float, kl_coeffs: Sequence[float]
) -> dict[str, Tensor]:
    """Return the ProMP loss and its metrics, [b] each. Rothfuss et al. 2019, section 6.

    The loss is the clipped surrogate after adaptation plus (1/K) Σ_k η_k KL_k before it, with η = `kl_coeffs`.
    """
    rows, adapted = chunk.rounds[-1], current[-1]
    loss, clipped = clipped_loss(adapted, rows, clip_eps)
    kls = [step.mean(step.behavior.kl(now)) for step, now in zip(chunk.rounds[:-1], current[:-1], strict=True)]
    for coeff, kl in zip(kl_coeffs, kls, strict=True):
        loss = loss + coeff / len(kls) * kl
    return {
        LOSS: loss,
        **{f"{INNER_KL}{k}": kl for k, kl in enumerate(kls)},
        OUTER_KL: rows.mean(rows.behavior.kl(adapted.detach())),
        "clip_fraction": clipped,
    }


def adapted_kl_coeff(coeff: float, kl: float, target: float) -> float:
    """Return the adapted η: halved if KL < target / 1.5, doubled if KL > 1.5 target, and clipped to [1e-6, 1e2].

    The reference has no bounds, so a KL that stays on one side of the target drives η to 0 or infinity.
    """
    if kl < target / 1.5:
        coeff /= 2
    elif kl > target * 1.5:
        coeff *= 2
    return min(max(coeff, MIN_INNER_KL_PENALTY), MAX_INNER_KL_PENALTY)

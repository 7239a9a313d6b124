"""Proximal meta-policy search (ProMP). Rothfuss et al. 2019, arXiv:1810.06784."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal

import numpy as np
from pydantic import Field, model_validator

from pipeline.algorithms.contract import ParallelMap
from pipeline.algorithms.gradient_based import NUM_UPDATES, GradientBased, step_size_logs
from pipeline.algorithms.losses import clipped_surrogate, likelihood_ratio_loss
from pipeline.distributions import DiagGaussian, likelihood_ratio
from pipeline.optimizers import Adam
from pipeline.seeding import generator
from pipeline.types import Array, LearnerState, Metrics, Params, Step

if TYPE_CHECKING:
    from torch import Tensor

    from pipeline.algorithms.meta_gradient import MetaProblem, TaskValues
    from pipeline.algorithms.rows import Chunk, TaskRows
    from pipeline.policies.gaussian import GaussianPolicy

DEFAULT_TARGET_INNER_KL = 0.01
MIN_INNER_KL_PENALTY = 1e-6
MAX_INNER_KL_PENALTY = 1e2
INNER_KL_COEFF = "inner_kl_coeff"


class ProMP(GradientBased):
    """ProMP: clipped surrogate after adaptation, likelihood-ratio inner steps, KL penalty before adaptation.

    Defaults are those of the authors' run scripts.
    """

    name: Literal["promp"] = "promp"

    clip_eps: float = Field(default=0.3, gt=0)
    """Clipping range ε of the post-update likelihood ratio."""
    anneal_factor: float = Field(default=1.0, gt=0, le=1)
    """Multiplies clip_eps after every iteration: ε_i = clip_eps * anneal_factor**i."""
    outer_lr: float = Field(default=1e-3, gt=0)
    """Step size of Adam on the meta-parameters."""
    num_epochs: int = Field(default=5, ge=1)
    """Passes over the samples of an iteration."""
    num_minibatches: int = Field(default=1, ge=1)
    """Adam steps per epoch, each on its own share of the steps of every task and round."""

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
        params, extra = self.initial_params(policy, run_seed)
        extra[INNER_KL_COEFF] = np.full(self.inner_steps, self.init_inner_kl_penalty)
        learned = {name: params[name] for name in policy.learned(params)} | step_size_logs(extra)
        return LearnerState(params, Adam(self.outer_lr).initialize(learned), extra)

    def inner_loss(self, current: DiagGaussian, rows: TaskRows) -> Tensor:
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
            **{f"inner_kl_{k}": kl for k, kl in enumerate(inner_kls)},
            "outer_kl": rows.mean(rows.behavior.kl(DiagGaussian(adapted.mean.detach(), adapted.log_std.detach()))),
            "clip_fraction": rows.mean(outside.to(ratio.dtype)),
        }

    def optimize(
        self,
        policy: GaussianPolicy,
        learner: LearnerState,
        steps: Sequence[Step],
        *,
        run_seed: int,
        iteration: int,
        parallel: ParallelMap = map,
    ) -> tuple[LearnerState, Metrics]:
        """Adam on the meta-objective over the samples of one iteration; see Algorithm."""
        from pipeline.algorithms.meta_gradient import meta_gradient, meta_objective
        from pipeline.algorithms.rows import build_chunks

        self._require_all_rounds(steps)
        problem, adam = self.problem(policy, learner), Adam(self.outer_lr)
        meta_params, state = learner.params | step_size_logs(learner.extra), learner.optimizer
        everything = build_chunks(steps, self.tasks_per_chunk, parallel=parallel)
        before: TaskValues = {}
        gradient_norm = math.nan
        for chunks in self._minibatches(steps, everything, run_seed, iteration, parallel):
            gradients, values = meta_gradient(problem, meta_params, chunks, parallel=parallel)
            if not before:
                all_at_once = chunks is everything
                before = values if all_at_once else meta_objective(problem, meta_params, everything, parallel=parallel)
                gradient_norm = _norm(gradients)
            meta_params, state = adam.step(meta_params, gradients, state)
        after = meta_objective(problem, meta_params, everything, parallel=parallel)
        metrics = self._metrics(learner, meta_params, before, after) | {"meta_gradient_norm": gradient_norm}
        return self._next_learner(learner, meta_params, state, after), metrics

    def clip_eps_now(self, learner: LearnerState) -> float:
        """ε of this iteration, annealed. The reference accepts anneal_factor but never applies it."""
        return self.clip_eps * self.anneal_factor ** int(learner.extra[NUM_UPDATES])

    def problem(self, policy: GaussianPolicy, learner: LearnerState) -> MetaProblem:
        """What is differentiated in this iteration."""
        from pipeline.algorithms.meta_gradient import MetaProblem

        kl_coeffs = learner.extra[INNER_KL_COEFF].tolist()
        outer_loss = partial(self.outer_loss, clip_eps=self.clip_eps_now(learner), kl_coeffs=kl_coeffs)
        return MetaProblem(policy, self.inner_loss, self.inner_lr, self.first_order, outer_loss)

    def _minibatches(
        self, steps: Sequence[Step], everything: list[Chunk], run_seed: int, iteration: int, parallel: ParallelMap
    ) -> Iterator[list[Chunk]]:
        from pipeline.algorithms.rows import build_chunks, minibatch_rows

        for epoch in range(self.num_epochs):
            if self.num_minibatches == 1:
                yield everything
                continue
            rng = generator(run_seed, "minibatches", iteration, epoch)
            masks = [step.samples.mask.reshape(len(step.samples.mask), -1) for step in steps]
            rounds = [minibatch_rows(mask, self.num_minibatches, rng) for mask in masks]
            for rows in zip(*rounds, strict=True):
                yield build_chunks(steps, self.tasks_per_chunk, rows, parallel=parallel)

    def _metrics(
        self, learner: LearnerState, meta_params: Mapping[str, Array], before: TaskValues, after: TaskValues
    ) -> Metrics:
        metrics = {
            "loss_before": _mean(before["loss"]),
            "loss_after": _mean(after["loss"]),
            "outer_kl": _mean(after["outer_kl"]),
            "clip_fraction": _mean(after["clip_fraction"]),
            "clip_eps": self.clip_eps_now(learner),
        }
        if self.inner_steps:
            metrics["inner_kl"] = float(np.mean(self._inner_kls(after)))
            metrics["inner_kl_coeff"] = float(np.mean(learner.extra[INNER_KL_COEFF]))
        if self.trainable_inner_lr:
            logs = np.concatenate([log.ravel() for log in step_size_logs(meta_params).values()])
            metrics["inner_lr"] = float(np.exp(logs, dtype=np.float64).mean())
        return metrics

    def _next_learner(
        self, learner: LearnerState, meta_params: Mapping[str, Array], state: Params, after: TaskValues
    ) -> LearnerState:
        extra = learner.extra | step_size_logs(meta_params)
        extra[NUM_UPDATES] = np.array(learner.extra[NUM_UPDATES] + 1)
        if self.adaptive_inner_kl_penalty:
            pairs = zip(learner.extra[INNER_KL_COEFF].tolist(), self._inner_kls(after), strict=True)
            extra[INNER_KL_COEFF] = np.array([adapted_kl_coeff(c, kl, self.target_inner_kl) for c, kl in pairs])
        return LearnerState({name: meta_params[name] for name in learner.params}, state, extra)

    def _inner_kls(self, values: TaskValues) -> list[float]:
        return [_mean(values[f"inner_kl_{k}"]) for k in range(self.inner_steps)]

    def _require_all_rounds(self, steps: Sequence[Step]) -> None:
        found, required = [step.k for step in steps], list(range(self.inner_steps + 1))
        if found != required:
            raise ValueError(f"meta_optimize: found samples of rounds {found}; required {required}, in this order")


def adapted_kl_coeff(coeff: float, kl: float, target: float) -> float:
    """η after the adaptive rule: halved below target / 1.5, doubled above 1.5 target, within [1e-6, 1e2].

    Without the bounds, which the reference lacks, a KL that stays on one side drives η to 0 or infinity.
    """
    if kl < target / 1.5:
        coeff /= 2
    elif kl > target * 1.5:
        coeff *= 2
    return min(max(coeff, MIN_INNER_KL_PENALTY), MAX_INNER_KL_PENALTY)


def _mean(values: Array) -> float:
    return float(values.mean(dtype=np.float64))


def _norm(gradients: Mapping[str, Array]) -> float:
    return math.sqrt(sum(float(np.sum(np.square(value, dtype=np.float64))) for value in gradients.values()))

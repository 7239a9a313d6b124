"""Settings for algorithms that adapt by gradient steps: plain data, without torch."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, Field, JsonValue, field_validator, model_validator

from metaloom.pipeline.algorithms.contract import AlgorithmSettings, RunSettings
from metaloom.pipeline.estimation.config import processing_problems
from metaloom.pipeline.nn.optimization import NaturalSteps, OptimizerConfig, ScheduledSteps
from metaloom.pipeline.schema import MOST_REPEATS, Settings, later

DEFAULT_TARGET_INNER_KL = 0.01


class GradientBased(BaseModel):
    """Settings for adaptation by gradient steps on each task's samples."""

    graph: ClassVar[str] = "on_policy"
    learns_from: ClassVar[tuple[str, ...]] = ("advantages",)
    """Fields of Samples that the losses require."""
    minibatches_per_epoch: ClassVar[int] = 1

    inner_lr: float = Field(default=0.1, gt=0)
    """Step size of the inner gradient steps; with trainable_inner_lr, the initial step size."""
    inner_steps: int = Field(default=1, ge=0)
    """Gradient steps per adaptation; with 0, one policy is trained on all tasks without adaptation."""
    trainable_inner_lr: bool = False
    """Meta-learn a step size for each parameter element and inner step (Meta-SGD, Li et al. 2017)."""
    first_order: bool = False
    """Treat the inner gradients as constants in the meta-gradient."""
    tasks_per_chunk: int = Field(default=2, ge=1)
    """Tasks computed together in a chunk. This bounds memory and determines the order of sums, so the last bits of
    results depend on it."""

    gradient_noise: bool = later(False)
    """Record how much the meta-gradient varies across tasks: its standard error, and the cosine between the gradients
    of two halves of the tasks."""

    @model_validator(mode="after")
    def _inner_settings_agree(self) -> "GradientBased":
        for name in ("trainable_inner_lr", "first_order"):
            if getattr(self, name) and self.inner_steps == 0:
                raise ValueError(f"{name} is on but inner_steps is 0, so there is no inner step; turn it off")
        return self

    @property
    def run_defaults(self) -> Mapping[str, Any]:
        return {"processing": {"name": "dice"}} if "adjusted_rewards" in self.learns_from else {}

    @property
    def adaptation_steps(self) -> int:
        return self.inner_steps

    def problems(self, run: RunSettings) -> Iterator[str]:
        name = run.algorithm.name
        if run.samples_until_enough:
            yield f"min_steps or min_rollouts is set but {name} needs the same number of episodes per task; remove both"
        if self.gradient_noise and run.num_tasks < 2:
            yield (
                "algorithm.gradient_noise is on but num_tasks is 1, and the noise is estimated from differences "
                "between tasks; turn it off"
            )
        parts, steps_per_task = self.minibatches_per_epoch, run.episodes_per_task * run.max_episode_steps
        if parts > steps_per_task:
            yield (
                f"algorithm.num_minibatches is {parts} but a task has at most {steps_per_task} steps "
                "(episodes_per_task * max_episode_steps); use at most that many"
            )
        if "adjusted_rewards" in self.learns_from and parts > run.episodes_per_task:
            yield (
                f"algorithm.num_minibatches is {parts} but episodes_per_task is {run.episodes_per_task} and "
                f"{name} takes whole episodes; use at most that many"
            )
        for problem in processing_problems(run.processing, self.learns_from):
            yield f"{problem} (algorithm.name is {name})"


class MetaAdam(ScheduledSteps):
    """Settings for meta-updates with an optimizer, in epochs over each iteration's samples."""

    outer_lr: float = Field(default=1e-3, gt=0)
    """Step size of the optimizer for the meta-parameters."""
    num_epochs: int = Field(default=1, ge=1, le=MOST_REPEATS)
    """Number of passes over each iteration's samples."""
    num_minibatches: int = Field(default=1, ge=1, le=MOST_REPEATS)
    """Optimizer steps per epoch, each on a disjoint share of each task's environment steps."""
    tolerance: float | None = Field(default=None, gt=0)
    """Stop after an epoch that changes the meta-loss by less than this."""
    target_kl: float | None = later(None, gt=0)
    """Stop after an epoch in which the mean KL from behavior to adapted policies exceeds this, in nats."""
    max_grad_norm: float | None = later(None, gt=0)
    """Maximum Euclidean norm of the meta-gradient in each optimizer step; longer gradients are rescaled."""
    optimizer: OptimizerConfig | None = later(None)
    """Optimizer from torch.optim and its options. The default is Adam as in the references, with ε outside the bias
    correction."""

    @model_validator(mode="after")
    def _limits_can_act(self) -> "MetaAdam":
        if self.tolerance is not None and self.num_epochs == 1:
            raise ValueError(
                f"tolerance is {self.tolerance} but num_epochs is 1, so there is no epoch to skip; "
                "raise num_epochs or remove tolerance"
            )
        if self.target_kl is not None and (self.num_epochs == 1 or self.num_minibatches > 1):
            raise ValueError(
                f"target_kl is {self.target_kl} but num_epochs is {self.num_epochs} and num_minibatches is "
                f"{self.num_minibatches}; it acts between epochs over all samples, so raise num_epochs, and use one "
                "minibatch, or remove target_kl"
            )
        return self

    @property
    def minibatches_per_epoch(self) -> int:
        return self.num_minibatches


class Exploration(GradientBased):
    """Settings for MAML's inner loss and for E-MAML's credit for exploration."""

    inner_loss: Literal["log_likelihood", "likelihood_ratio"] = "log_likelihood"
    """Loss of the inner steps: -mean(A log π), or -mean(r A), whose second derivative has one more term."""
    exploration: bool = False
    """Credit the policies before adaptation for the rewards after it (E-MAML, Stadie et al. 2018)."""
    e_maml_scale: Literal["mean", "sum"] = "mean"
    """Scale of the credit: a mean over steps, or that mean times the episodes per task."""
    exploration_rounds: Literal["all", "first"] = "all"
    """Rollout batches that receive credit: all before the last, or only the first, as in the ProMP code."""

    @field_validator("inner_loss", mode="before")
    @classmethod
    def _dice_has_algorithms_of_its_own(cls, value: Any) -> Any:
        if value == "dice":
            raise ValueError(
                "the DiCE loss is not supported here: it needs differently processed samples, and its variance is too "
                "high for a trust region, as its authors found too; use the algorithms dice-maml or vpg-dice"
            )
        return value

    @model_validator(mode="after")
    def _credit_is_given(self) -> "Exploration":
        for name, default in (("e_maml_scale", "mean"), ("exploration_rounds", "all")):
            if not self.exploration and getattr(self, name) != default:
                raise ValueError(f"{name} requires exploration, which is off; turn exploration on or remove {name}")
        if self.exploration and self.inner_steps == 0:
            raise ValueError(
                "exploration is on but inner_steps is 0, so no rollout batch comes before adaptation; turn it off"
            )
        return self


class TrustRegion(NaturalSteps, GradientBased, Settings):
    """Settings for a meta-update within a trust region, which bounds the mean KL after adaptation.

    TRPO, Schulman et al. 2015, arXiv:1502.05477.
    """

    learner: ClassVar[str] = "metaloom.pipeline.algorithms.maml.trpo:TrustRegionLearner"

    hvp: Literal["gauss_newton", "hessian", "finite_difference", "fd_unscaled"] = "gauss_newton"
    """Method for metric-vector products. gauss_newton (formerly exact): the Fisher matrix of the adapted policies,
    pulled back through the adaptation; it equals the Hessian of the KL if the current policies are the behavior
    policies, as in training. hessian: the Hessian of the KL, which may be indefinite. finite_difference: central
    differences of the KL's gradient in float64, with a step scaled to the vector. fd_unscaled: the same in float32,
    with an absolute step of 1e-5, as in the ProMP code."""
    hvp_subsample: float = Field(default=1.0, gt=0, le=1)
    """Fraction of each task's steps used to compute these products."""
    kl_order: Literal["old_new", "new_old"] = "old_new"
    """Direction of the bounded KL: KL(behavior ‖ updated), or KL(updated ‖ behavior) as in some implementations."""

    @field_validator("hvp", mode="before")
    @classmethod
    def _exact_is_its_old_name(cls, value: Any) -> Any:
        return "gauss_newton" if value == "exact" else value

    def decisive(self) -> dict[str, JsonValue]:
        """Return the decisive settings with `hvp` spelled as in version 0.1, so that its digests stay valid."""
        decisive = super().decisive()
        return decisive | {"hvp": "exact"} if decisive["hvp"] == "gauss_newton" else decisive

    @model_validator(mode="after")
    def _the_region_is_of_the_policy(self) -> "TrustRegion":
        if self.trainable_inner_lr:
            raise ValueError(
                "trainable_inner_lr is on, but the trust region measures changes of the policy, which do not "
                "include step sizes; turn it off, or use maml-vpg or promp, which train step sizes with Adam"
            )
        if self.first_order and self.hvp != "gauss_newton":
            raise ValueError(
                f"first_order is on and hvp is {self.hvp}: derivatives of a first-order gradient are not symmetric, "
                "which conjugate gradient needs; use hvp=gauss_newton"
            )
        return self


class ProMP(MetaAdam, GradientBased, AlgorithmSettings):
    """ProMP: clipped surrogate after adaptation, likelihood-ratio inner steps, KL penalty before adaptation.

    Rothfuss et al. 2019, arXiv:1810.06784. Defaults follow the authors' run scripts.
    """

    learner: ClassVar[str] = "metaloom.pipeline.algorithms.maml.promp:ProMPLearner"

    name: Literal["promp"] = "promp"

    clip_eps: float = Field(default=0.3, gt=0)
    """Clipping range ε of the post-update likelihood ratio."""
    anneal_factor: float = Field(default=1.0, gt=0, le=1)
    """Factor that multiplies clip_eps after every iteration: ε_i = clip_eps * anneal_factor**i."""
    num_epochs: int = Field(default=5, ge=1, le=MOST_REPEATS)
    """Number of passes over each iteration's samples."""

    init_inner_kl_penalty: float = Field(default=5e-4, ge=0)
    """Initial coefficient η of the KL from a rollout batch's behavior policy to the current policy."""
    adaptive_inner_kl_penalty: bool = False
    """Halve or double an inner step's η when its KL leaves [target / 1.5, 1.5 target]."""
    target_inner_kl: float = Field(default=DEFAULT_TARGET_INNER_KL, gt=0)
    """Target KL of the adaptive rule, in nats."""

    @model_validator(mode="after")
    def _kl_settings_agree(self) -> "ProMP":
        if self.adaptive_inner_kl_penalty and self.inner_steps == 0:
            raise ValueError(
                "adaptive_inner_kl_penalty is on but inner_steps is 0, so there is no inner-step KL; turn it off"
            )
        if self.adaptive_inner_kl_penalty and self.init_inner_kl_penalty == 0:
            raise ValueError("adaptive_inner_kl_penalty is on but init_inner_kl_penalty is 0; use a positive value")
        if not self.adaptive_inner_kl_penalty and self.target_inner_kl != DEFAULT_TARGET_INNER_KL:
            raise ValueError(
                f"target_inner_kl is {self.target_inner_kl} but adaptive_inner_kl_penalty is off; "
                "turn it on or remove target_inner_kl"
            )
        return self


class MAMLVPG(MetaAdam, Exploration, AlgorithmSettings):
    """MAML-VPG: policy-gradient inner steps, and a policy-gradient meta-update with Adam.

    Finn et al. 2017, arXiv:1703.03400, algorithm 3. Defaults follow the ProMP authors' experiments.
    """

    learner: ClassVar[str] = "metaloom.pipeline.algorithms.maml.policy_gradient:MAMLVPGLearner"

    name: Literal["maml-vpg"] = "maml-vpg"


class MAMLPPO(MetaAdam, GradientBased, AlgorithmSettings):
    """MAML-PPO: likelihood-ratio inner steps, and PPO's clipped surrogate after them.

    MAML with PPO (Schulman et al. 2017, arXiv:1707.06347), as implemented in garage. In garage, the old policy is an
    alias of the current one, so the ratio is always 1 and never clipped, before or after adaptation. Here, the ratios
    differ from 1 after the first Adam step of an iteration.
    """

    learner: ClassVar[str] = "metaloom.pipeline.algorithms.maml.policy_gradient:MAMLPPOLearner"

    name: Literal["maml-ppo"] = "maml-ppo"

    clip_eps: float = Field(default=0.2, gt=0)
    """Clipping range ε of the likelihood ratios."""
    inner_loss: Literal["likelihood_ratio", "clipped"] = later("likelihood_ratio", before="clipped")
    """Loss of the inner steps: -mean(r A), or the clipped surrogate, whose flat regions let the pre-update policy drift
    without bound when an iteration takes several Adam steps."""
    num_epochs: int = Field(default=5, ge=1, le=MOST_REPEATS)
    """Number of passes over each iteration's samples; the first step is never clipped."""

    def warnings(self) -> Iterator[str]:
        if self.inner_loss == "clipped" and self.num_epochs > 1:
            yield (
                f"algorithm.inner_loss is clipped with {self.num_epochs} epochs: where the inner loss is flat, the "
                "policy before adaptation drifts without bound; prefer inner_loss=likelihood_ratio or num_epochs=1"
            )


class MAMLTRPO(TrustRegion, Exploration, AlgorithmSettings):
    """MAML-TRPO: policy-gradient inner steps, and a meta-update that bounds the KL after adaptation.

    Finn et al. 2017, arXiv:1703.03400, section 5.3. Defaults follow the ProMP authors' run scripts, except for damping,
    which they omit.
    """

    name: Literal["maml-trpo"] = "maml-trpo"


class EMAML(TrustRegion, Exploration, AlgorithmSettings):
    """E-MAML: MAML-TRPO that credits pre-update policies for the rewards after adaptation.

    Stadie et al. 2018, arXiv:1803.01118. Defaults follow the ProMP authors' run script.
    """

    name: Literal["e-maml"] = "e-maml"
    exploration: bool = True
    """Always on; without it, this would be maml-trpo."""

    @model_validator(mode="after")
    def _exploration_is_on(self) -> "EMAML":
        if not self.exploration:
            raise ValueError("exploration is off, and e-maml without it is maml-trpo; use algorithm.name=maml-trpo")
        return self


class DiceMAML(MetaAdam, GradientBased, AlgorithmSettings):
    """DICE-MAML, with the DiCE loss of discounted rewards minus a baseline in the inner steps and the meta-update.

    Foerster et al. 2018, arXiv:1802.05098; used for meta-learning in Rothfuss et al. 2019, arXiv:1810.06784.
    Its meta-gradients are unbiased but noisy, so it needs several times as many episodes as other algorithms.
    """

    learner: ClassVar[str] = "metaloom.pipeline.algorithms.maml.policy_gradient:DiceLearner"
    learns_from: ClassVar[tuple[str, ...]] = ("adjusted_rewards",)

    name: Literal["dice-maml"] = "dice-maml"

    @model_validator(mode="after")
    def _no_tolerance(self) -> "DiceMAML":
        if self.tolerance is not None:
            raise ValueError(
                f"tolerance is {self.tolerance} but the value of the DiCE loss is constant in the parameters, unlike "
                "its derivatives; remove tolerance"
            )
        return self


class VPGDice(MetaAdam, GradientBased, AlgorithmSettings):
    """VPG-DICE: the DiCE loss in the inner steps, and the log-likelihood loss in the meta-update.

    Rothfuss et al. 2019, arXiv:1810.06784, section 7.3, compare it with the other estimators of the meta-gradient.
    """

    learner: ClassVar[str] = "metaloom.pipeline.algorithms.maml.policy_gradient:DiceLearner"
    learns_from: ClassVar[tuple[str, ...]] = ("adjusted_rewards", "advantages")

    name: Literal["vpg-dice"] = "vpg-dice"


MetaSettings = ProMP | MAMLVPG | MAMLPPO | MAMLTRPO | EMAML | DiceMAML | VPGDice
"""Settings for any algorithm that adapts by gradient steps."""

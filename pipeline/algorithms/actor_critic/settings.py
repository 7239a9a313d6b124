"""Settings for A2C, PPO, PPO2 and SVPG."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, JsonValue, ValidationError, model_validator

from metaloom.pipeline.algorithms import ALGORITHMS
from metaloom.pipeline.algorithms.contract import AlgorithmSettings, RunSettings
from metaloom.pipeline.estimation.config import ValueTarget, processing_problems
from metaloom.pipeline.nn.optimization import LearningRate, OptimizerConfig
from metaloom.pipeline.policies.config import LayerSize, PolicyConfig
from metaloom.pipeline.schema import MOST_REPEATS, ByName, later

RUN_DEFAULTS: Mapping[str, Any] = {
    "num_tasks": 1,
    "env": {"action_scale": None},
    "baseline": {"name": "zero"},
    "processing": {"gae_lambda": 0.95},
}
"""Defaults that these algorithms set for other run settings."""


class ActorCritic(BaseModel):
    """Settings for a policy and a critic that learn from the same complete episodes."""

    graph: ClassVar[str] = "on_policy"
    learner: ClassVar[str] = "metaloom.pipeline.algorithms.actor_critic.learner:ActorCriticLearner"
    policy_clip: ClassVar[float | None] = None
    """Clipping range of the likelihood ratio, or None without clipping."""
    value_clip: ClassVar[float | None] = None
    """Clipping range for changes of a value, or None without clipping."""
    critic_weight: ClassVar[float] = 1.0
    """Weight of the critic's loss in gradient steps shared with the policy."""

    num_epochs: int = Field(default=1, ge=1, le=MOST_REPEATS)
    """Number of passes over each iteration's samples."""
    batch_size: int = Field(default=64, ge=1)
    """Maximum number of environment steps per gradient step; an epoch's steps are split evenly."""
    max_grad_norm: float | None = Field(default=None, gt=0)
    """Maximum Euclidean norm of the policy's gradient; longer gradients are rescaled."""
    entropy_coeff: float = Field(default=0.0, ge=0)
    """Weight of the policy's entropy, which is maximized."""
    initial_output_scale: float = Field(default=0.01, ge=0)
    """Scale factor for the policy's initial output layer. Near 0, the first actions hardly depend on observations."""
    advantage_scaling: Literal["batch", "running"] = "batch"
    """With processing.normalize_advantages: normalize over this iteration's steps, or over all steps so far."""
    critic_hidden_sizes: tuple[LayerSize, ...] = (64, 64)
    """Units in each hidden layer of the critic."""
    value_target: ValueTarget = "td_lambda"
    """Critic targets: its own values plus advantages, or the observed discounted returns."""
    optimizer: OptimizerConfig = later(OptimizerConfig(name="adam"))
    """Optimizer for the policy and, with separate state, the critic. adam and rmsprop use ε = 1e-5 unless set."""
    critic_network: str | None = later(None)
    """The critic's network, with the same choices as policy.network; null: the policy's network."""
    critic_network_options: dict[str, JsonValue] = later({})
    """Options of critic_network; see policy.network_options."""
    critic_activation: str | None = later(None)
    """Activation after the critic's hidden layers, with the same choices as policy.activation; null: the policy's."""

    @model_validator(mode="after")
    def _options_have_a_network(self) -> "ActorCritic":
        if self.critic_network_options and self.critic_network is None:
            raise ValueError(
                f"critic_network_options is {self.critic_network_options} but critic_network is not set, so the critic "
                "has the policy's options; set critic_network too"
            )
        return self

    @property
    def networks(self) -> tuple[str, ...]:
        return () if self.critic_network is None else (self.critic_network,)

    @property
    def run_defaults(self) -> Mapping[str, Any]:
        return RUN_DEFAULTS

    def critic_like(self, policy: PolicyConfig) -> PolicyConfig:
        """Return the critic's network settings, which default to the policy's.

        Raises ValueError if the critic's settings contradict each other.
        """
        own: dict[str, JsonValue] = {"hidden_sizes": list(self.critic_hidden_sizes)}
        if self.critic_network is not None:
            own |= {"network": self.critic_network, "network_options": self.critic_network_options}
        if self.critic_activation is not None:
            own |= {"activation": self.critic_activation}
        return type(policy).model_validate(policy.model_dump(mode="json") | own)

    def problems(self, run: RunSettings) -> Iterator[str]:
        name = run.algorithm.name
        if run.baseline.name != "zero":
            yield f"baseline is {run.baseline.name} but {name} has a critic instead; remove baseline"
        for problem in processing_problems(run.processing, ("advantages",)):
            yield f"{problem} (algorithm.name is {name})"
        if self.advantage_scaling == "running" and not run.processing.normalize_advantages:
            yield (
                "algorithm.advantage_scaling is running but processing.normalize_advantages is off, so nothing is "
                "scaled; remove one of them"
            )
        if self.advantage_scaling == "running" and run.processing.adv_norm != "std":
            yield (
                f"processing.adv_norm is {run.processing.adv_norm} but algorithm.advantage_scaling is running, "
                "which divides by the standard deviation; remove one of them"
            )
        try:
            self.critic_like(run.policy)
        except ValidationError as error:
            for problem in error.errors():
                yield f"the critic's network: {problem['msg'].removeprefix('Value error, ')}"


class JointLoss(ActorCritic):
    """Settings for gradient steps that policy and critic share."""

    batch_size: int = Field(default=32, ge=1)
    """Maximum number of environment steps per gradient step; an epoch's steps are split evenly."""
    entropy_coeff: float = Field(default=1e-3, ge=0)
    """Weight of the policy's entropy, which is maximized."""
    value_target: ValueTarget = "empirical"
    """Critic targets: its own values plus advantages, or the observed discounted returns."""
    value_coeff: float = Field(default=0.5, gt=0)
    """Weight of the critic's loss."""

    @property
    def critic_weight(self) -> float:
        return self.value_coeff


class A2C(JointLoss, LearningRate, AlgorithmSettings):
    """Advantage actor-critic: one pass of policy gradient and critic regression over an iteration's steps.

    The synchronous form of Mnih et al. 2016, arXiv:1602.01783, optimized with RMSprop.
    """

    name: Literal["a2c"] = "a2c"

    num_epochs: Literal[1] = 1
    """Always 1: without a likelihood ratio, a second pass over the same steps would be off-policy."""
    optimizer: OptimizerConfig = later(OptimizerConfig(name="rmsprop"))
    """Optimizer for the policy and, with separate state, the critic. adam and rmsprop use ε = 1e-5 unless set."""


class PPO(ActorCritic, LearningRate, AlgorithmSettings):
    """Proximal policy optimization (Schulman et al. 2017, arXiv:1707.06347) with a separate critic.

    The critic is trained first; the policy then learns from advantages computed with the updated critic.
    """

    name: Literal["ppo"] = "ppo"

    num_epochs: int = Field(default=3, ge=1)
    """Number of passes over each iteration's samples."""
    clip_eps: float = Field(default=0.1, gt=0)
    """Clipping range ε of the likelihood ratio."""
    critic_learning_rate: float = Field(default=5e-4, gt=0)
    """Step size of the critic's optimizer."""
    critic_num_epochs: int = Field(default=10, ge=1)
    """Number of passes over each iteration's samples when training the critic."""
    critic_batch_size: int = Field(default=64, ge=1)
    """Environment steps per gradient step of the critic."""
    critic_max_grad_norm: float | None = Field(default=None, gt=0)
    """Maximum Euclidean norm of the critic's gradient; longer gradients are rescaled."""

    @property
    def policy_clip(self) -> float:
        return self.clip_eps


class PPO2(JointLoss, LearningRate, AlgorithmSettings):
    """PPO with a joint policy and critic loss, and clipped value changes, as in OpenAI Baselines."""

    name: Literal["ppo2"] = "ppo2"

    num_epochs: int = Field(default=3, ge=1)
    """Number of passes over each iteration's samples."""
    clip_eps: float = Field(default=0.1, gt=0)
    """Clipping range ε of the likelihood ratio and of value changes."""

    @property
    def policy_clip(self) -> float:
        return self.clip_eps

    @property
    def value_clip(self) -> float:
        return self.clip_eps


ActorCriticSettings = A2C | PPO | PPO2  # settings for any actor-critic, used on its own or as an SVPG particle


class SVPG(AlgorithmSettings):
    """Stein variational policy gradient (Liu et al. 2017, arXiv:1704.02399).

    Several policies (particles), each with its own critic, maximize their returns and repel each other.
    """

    graph: ClassVar[str] = "on_policy"
    learner: ClassVar[str] = "metaloom.pipeline.algorithms.actor_critic.stein:SVPGLearner"

    name: Literal["svpg"] = "svpg"

    particle: Annotated[ActorCriticSettings, ByName(ALGORITHMS, ActorCritic)] = A2C()
    """Algorithm of each particle and its options; a bare name selects the algorithm with its defaults."""
    num_particles: int = Field(default=4, ge=1)
    """Number of policies. Each acts in one task, so num_tasks must be the same number."""
    temperature: float = Field(default=1.0, gt=0)
    """Temperature. Near 0, each particle follows its own policy gradient; larger values increase the repulsion."""
    temperature_decay: float = Field(default=1.0, gt=0, le=1)
    """Factor that multiplies the temperature after every iteration."""
    prior_std: float | None = Field(default=None, gt=0)
    """Standard deviation of a zero-mean Gaussian prior on all parameters; null: a flat prior."""
    horizon: int | None = Field(default=None, ge=1)
    """Number of iterations after which all particles, critics and optimizers are reinitialized."""

    @model_validator(mode="after")
    def _particle_settings_apply(self) -> "SVPG":
        if self.particle.advantage_scaling == "running":
            raise ValueError("particle.advantage_scaling is running, but particles do not share time steps; use batch")
        if self.particle.kernel != "auto":
            raise ValueError(f"particle.kernel is {self.particle.kernel}; set algorithm.kernel instead")
        return self

    @property
    def run_defaults(self) -> Mapping[str, Any]:
        return {**RUN_DEFAULTS, "num_tasks": self.num_particles}

    @property
    def num_policies(self) -> int:
        return self.num_particles

    def problems(self, run: RunSettings) -> Iterator[str]:
        yield from self.particle.problems(run)
        if run.num_tasks != self.num_particles:
            yield (
                f"num_tasks is {run.num_tasks} but algorithm.num_particles is {self.num_particles}, and every particle "
                "acts in one task; remove num_tasks"
            )

"""Settings for algorithms whose policies act on the history of a trial and learn from whole trials.

RL2 (Duan et al. 2016, arXiv:1611.02779, and Wang et al. 2016, arXiv:1611.05763) keeps its memory across the episodes of
a trial. Recurrent A2C and PPO, for a single task, reset their memory after each episode.
"""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, Field

from metaloom.pipeline.algorithms.actor_critic.settings import RUN_DEFAULTS
from metaloom.pipeline.algorithms.contract import AlgorithmSettings, RunSettings
from metaloom.pipeline.estimation.config import processing_problems
from metaloom.pipeline.nn.optimization import LearningRate, NaturalSteps, OptimizerConfig
from metaloom.pipeline.nn.spec import BUILT_IN_NETWORKS, RECURRENT_NETWORKS
from metaloom.pipeline.policies.config import ActorKind
from metaloom.pipeline.schema import MOST_REPEATS, later


class TrialSettings(BaseModel):
    """Settings for a policy that adapts to a task through the history of its episodes."""

    decides_episodes: ClassVar[tuple[str, ...]] = ("episodes_per_trial",)
    default_policy: ClassVar[Mapping[str, Any]] = {"hidden_sizes": (64, 64)}
    """Defaults for the policy settings."""

    episodes_per_trial: int = Field(default=2, ge=1)
    """Consecutive episodes of a task that share the policy's memory. episodes_per_task must be a multiple of it."""
    trial_end: Literal["seen", "unseen", "bootstrapped"] = later("seen", before="unseen")
    """Value after a trial's last step. seen: 0, and the critic sees the position in the trial; unseen: 0, and the
    critic does not; bootstrapped: the critic's value if the step limit ended the trial."""

    @property
    def run_defaults(self) -> Mapping[str, Any]:
        return {
            "env": {"action_scale": 1.0},
            "policy": self.default_policy,
            "baseline": {"name": "zero"},
            "processing": {"gae_lambda": 0.95},
            "episodes_per_task": self.episodes_per_trial,
        }

    @property
    def trial(self) -> int:
        return self.episodes_per_trial

    @property
    def position_size(self) -> int:
        """Number of critic inputs for the position in a trial; see Trials.position."""
        return self.episodes_per_trial + 2 if self.trial_end == "seen" else 0

    def problems(self, run: RunSettings) -> Iterator[str]:
        name = run.algorithm.name
        if run.baseline.name != "zero":
            yield f"baseline is {run.baseline.name} but {name} learns its own values instead; remove baseline"
        yield from self.own_problems(run)
        if run.samples_until_enough:
            yield (
                f"min_steps or min_rollouts is set but {name} has the same number of episodes in every trial; remove "
                "both"
            )
        if run.episodes_per_task % self.episodes_per_trial:
            yield (
                f"episodes_per_task is {run.episodes_per_task} but a trial has {self.episodes_per_trial} episodes "
                "(algorithm.episodes_per_trial); it must be a multiple of that, so that every task has whole trials"
            )
        yield from processing_problems(run.processing, ("advantages",))

    def own_problems(self, run: RunSettings) -> Iterator[str]:
        """Yield problems specific to this algorithm, each with a remedy."""
        yield from ()


class TrialSteps(TrialSettings, LearningRate):
    """Settings for joint gradient steps of policy and critic on minibatches of whole trials."""

    policy_clip: ClassVar[float | None] = None

    num_epochs: int = Field(default=10, ge=1, le=MOST_REPEATS)
    """Number of passes over each iteration's trials."""
    trials_per_minibatch: int = Field(default=16, ge=1)
    """Maximum number of whole trials per gradient step; an epoch's trials are split evenly."""
    value_coeff: float = Field(default=0.5, gt=0)
    """Weight of the value loss."""
    entropy_coeff: float = Field(default=0.0, ge=0)
    """Weight of the policy's entropy, which is maximized."""
    max_grad_norm: float | None = Field(default=0.5, gt=0)
    """Maximum Euclidean norm of the joint gradient of policy and critic; longer gradients are rescaled."""
    optimizer: OptimizerConfig = later(OptimizerConfig(name="adam"))
    """Joint optimizer for the policy and the critic."""


class TrialClipping(BaseModel):
    """Settings for PPO (Schulman et al. 2017, arXiv:1707.06347) on whole trials."""

    clip_eps: float = Field(default=0.2, gt=0)
    """Clipping range ε of the likelihood ratio."""

    @property
    def policy_clip(self) -> float:
        return self.clip_eps


class WithMemory(TrialSettings):
    """Settings for a recurrent policy with a linear critic on its memory."""

    graph: ClassVar[str] = "trials"
    learner: ClassVar[str] = "metaloom.pipeline.algorithms.rl2.learner:MemoryLearner"
    actor: ClassVar[ActorKind] = "recurrent"
    default_policy: ClassVar[Mapping[str, Any]] = {"network": "gru", "hidden_sizes": (128,)}

    initial_output_scale: float = Field(default=1.0, ge=0)
    """Scale factor for the policy's initial output layer. Near 0, the recurrent layers learn slowly at first, because
    their gradient passes through this layer."""

    def own_problems(self, run: RunSettings) -> Iterator[str]:
        name = run.algorithm.name
        if run.policy.name is not None:
            yield (f"policy.name is {run.policy.name} but {name} needs a memory; set policy.network to a custom class")
        if run.policy.network in BUILT_IN_NETWORKS:
            yield (
                f"policy.network is {run.policy.network}, which has no memory; use "
                f"{', '.join(RECURRENT_NETWORKS)}, or module:Class of a network with memory for {name}"
            )


class RL2(WithMemory, TrialClipping, TrialSteps, AlgorithmSettings):
    """A recurrent policy that adapts to a task through its memory of earlier episodes, trained with PPO."""

    name: Literal["rl2"] = "rl2"


class RL2TRPO(WithMemory, NaturalSteps, AlgorithmSettings):
    """RL2 as in its paper: every update is one step within a trust region."""

    learner: ClassVar[str] = "metaloom.pipeline.algorithms.rl2.learner:RL2TRPOLearner"

    name: Literal["rl2-trpo"] = "rl2-trpo"

    critic_regularization: float = Field(default=1e-5, ge=0)
    """Ridge coefficient in the critic's least-squares fit."""
    trials_per_chunk: int = Field(default=64, ge=1)
    """Number of trials differentiated at a time, which bounds the memory use of an update."""


class WithinEpisode(TrialSettings):
    """Settings for a recurrent policy on a single task, whose memory is reset after each episode."""

    adapts: ClassVar[bool] = False

    episodes_per_trial: Literal[1] = 1
    """Always 1: every episode starts with an empty memory."""
    trial_end: Literal["bootstrapped"] = later("bootstrapped")
    """Always bootstrapped: the step limit is not a real end of the episode."""

    @property
    def run_defaults(self) -> Mapping[str, Any]:
        return {**RUN_DEFAULTS, "policy": self.default_policy}


class RecurrentPPO(WithinEpisode, WithMemory, TrialClipping, TrialSteps, AlgorithmSettings):
    """PPO with a recurrent policy, on whole episodes."""

    name: Literal["recurrent-ppo"] = "recurrent-ppo"


class RecurrentA2C(WithinEpisode, WithMemory, TrialSteps, AlgorithmSettings):
    """A2C with a recurrent policy: one policy-gradient pass over whole episodes, with RMSprop."""

    name: Literal["recurrent-a2c"] = "recurrent-a2c"

    num_epochs: Literal[1] = 1
    """Always 1: without a likelihood ratio, a second pass over the same steps would be off-policy."""
    optimizer: OptimizerConfig = later(OptimizerConfig(name="rmsprop"))
    """Joint optimizer for the policy and the critic."""


MemorySteps = RL2 | RecurrentPPO | RecurrentA2C
"""Settings for any algorithm whose recurrent policy is trained with gradient steps."""
MemorySettings = MemorySteps | RL2TRPO  # settings for any algorithm with a recurrent policy

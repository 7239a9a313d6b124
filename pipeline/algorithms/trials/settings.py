"""Settings of algorithms whose policies act on the history of a trial and learn from whole trials.

RL2, Duan et al. 2016, arXiv:1611.02779, and Wang et al. 2016, arXiv:1611.05763, keeps its memory through the episodes
of a task; A2C and PPO of a single task keep theirs within an episode.
"""

from __future__ import annotations

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
    """A policy that adapts to a task through its history of episodes there."""

    decides_episodes: ClassVar[tuple[str, ...]] = ("episodes_per_trial",)
    default_policy: ClassVar[Mapping[str, Any]] = {"hidden_sizes": (64, 64)}
    """Defaults of the policy's settings."""

    episodes_per_trial: int = Field(default=2, ge=1)
    """Episodes of a task, one after the other, through which the policy's memory lasts; episodes_per_task make up
    one trial or several."""
    trial_end: Literal["seen", "unseen", "bootstrapped"] = later("seen", before="unseen")
    """Value after a trial's last step. seen: 0, and the critic sees how far the trial has come; unseen: 0, and it does
    not; bootstrapped: where the step limit ended the trial, the critic's own value."""

    @property
    def run_defaults(self) -> Mapping[str, Any]:
        """No baseline, noise that reaches the ends of the action box; see AlgorithmSettings."""
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
        """Number of inputs that give the critic the position in a trial; see Trials.position."""
        return self.episodes_per_trial + 2 if self.trial_end == "seen" else 0

    def problems(self, run: RunSettings) -> Iterator[str]:
        name = run.algorithm.name
        if run.baseline.name != "zero":
            yield f"baseline is {run.baseline.name} but {name} learns its own values instead; leave baseline out"
        yield from self.own_problems(run)
        if run.samples_until_enough:
            yield (
                f"min_steps or min_rollouts is set but {name} has equally many episodes in every trial; leave them out"
            )
        if run.episodes_per_task % self.episodes_per_trial:
            yield (
                f"episodes_per_task is {run.episodes_per_task} but a trial has {self.episodes_per_trial} episodes "
                "(algorithm.episodes_per_trial); required a multiple, whole trials of every task"
            )
        yield from processing_problems(run.processing, ("advantages",))

    def own_problems(self, run: RunSettings) -> Iterator[str]:
        """Yield problems of this algorithm alone, each with what to do."""
        yield from ()


class TrialSteps(TrialSettings, LearningRate):
    """Gradient steps of policy and values together, on minibatches of whole trials."""

    num_epochs: int = Field(default=10, ge=1, le=MOST_REPEATS)
    """Passes over the trials of an iteration."""
    trials_per_minibatch: int = Field(default=16, ge=1)
    """Maximum number of whole trials per gradient step; an epoch's steps are divided into equal parts."""
    value_coeff: float = Field(default=0.5, gt=0)
    """Weight of the loss of the values."""
    entropy_coeff: float = Field(default=0.0, ge=0)
    """Weight of the policy's entropy, which is maximized."""
    max_grad_norm: float | None = Field(default=0.5, gt=0)
    """Longer gradients, of policy and values together, are shortened to this Euclidean norm."""
    optimizer: OptimizerConfig = later(OptimizerConfig(name="adam"))
    """Optimizer of policy and values together."""

    @property
    def policy_clip(self) -> float | None:
        """Clipping range of the likelihood ratio, where it is clipped."""
        return None


class TrialClipping(BaseModel):
    """PPO, Schulman et al. 2017, arXiv:1707.06347, on whole trials."""

    clip_eps: float = Field(default=0.2, gt=0)
    """Clipping range ε of the likelihood ratio."""

    @property
    def policy_clip(self) -> float:
        return self.clip_eps


class WithMemory(TrialSettings):
    """A recurrent policy, with values that are a layer on its memory."""

    graph: ClassVar[str] = "trials"
    learner: ClassVar[str] = "metaloom.pipeline.algorithms.rl2.learner:MemoryLearner"
    actor: ClassVar[ActorKind] = "recurrent"
    default_policy: ClassVar[Mapping[str, Any]] = {"network": "gru", "hidden_sizes": (128,)}

    initial_output_scale: float = Field(default=1.0, ge=0)
    """Multiplies the policy's output layer at the start. Near 0, what is remembered hardly learns at first, since the
    gradient reaches it through this layer."""

    def own_problems(self, run: RunSettings) -> Iterator[str]:
        name = run.algorithm.name
        if run.policy.name is not None:
            yield (f"policy.name is {run.policy.name} but {name} needs a memory; set policy.network to a custom class")
        if run.policy.network in BUILT_IN_NETWORKS:
            yield (
                f"policy.network is {run.policy.network}, which has no memory; required "
                f"{', '.join(RECURRENT_NETWORKS)}, or module:Class of a network with a memory for {name}"
            )


class RL2(WithMemory, TrialClipping, TrialSteps, AlgorithmSettings):
    """A recurrent policy that adapts to a task through its memory of earlier episodes, trained by PPO."""

    name: Literal["rl2"] = "rl2"


class RL2TRPO(WithMemory, NaturalSteps, AlgorithmSettings):
    """RL2 as in its paper: every update is one step within a trust region."""

    learner: ClassVar[str] = "metaloom.pipeline.algorithms.rl2.trust_region:RL2TRPOLearner"

    name: Literal["rl2-trpo"] = "rl2-trpo"

    critic_regularization: float = Field(default=1e-5, ge=0)
    """Multiple of the identity in the least-squares fit of the values to their targets."""
    trials_per_chunk: int = Field(default=64, ge=1)
    """Whole trials that are differentiated at a time, which bounds the memory of an update."""


class WithinEpisode(TrialSettings):
    """A memory of the episode alone, on a single task."""

    episodes_per_trial: Literal[1] = 1
    """One: every episode begins with nothing remembered."""
    trial_end: Literal["bootstrapped"] = later("bootstrapped")
    """Bootstrapped: an episode that its step limit ends has not come to its end."""

    @property
    def adapts(self) -> bool:
        """No episode depends on another."""
        return False

    @property
    def run_defaults(self) -> Mapping[str, Any]:
        """Defaults of actor-critics, and one GRU; see AlgorithmSettings."""
        return {**RUN_DEFAULTS, "policy": self.default_policy}


class RecurrentPPO(WithinEpisode, WithMemory, TrialClipping, TrialSteps, AlgorithmSettings):
    """PPO of a policy that remembers its episode, on whole episodes."""

    name: Literal["recurrent-ppo"] = "recurrent-ppo"


class RecurrentA2C(WithinEpisode, WithMemory, TrialSteps, AlgorithmSettings):
    """A2C of a policy that remembers its episode: one pass of policy gradient over whole episodes, by RMSprop."""

    name: Literal["recurrent-a2c"] = "recurrent-a2c"

    num_epochs: Literal[1] = 1
    """One: a second pass would follow the gradient of a policy that no longer acts."""
    optimizer: OptimizerConfig = later(OptimizerConfig(name="rmsprop"))
    """Optimizer of policy and values together."""


MemorySteps = RL2 | RecurrentPPO | RecurrentA2C
"""The settings of an algorithm whose policy has a memory and learns by gradient steps."""
MemorySettings = MemorySteps | RL2TRPO
"""The settings of an algorithm whose policy has a memory."""

"""Settings of RL2, Duan et al. 2016, arXiv:1611.02779, with PPO; also Wang et al. 2016, arXiv:1611.05763."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from metaloom.pipeline.algorithms.contract import AlgorithmSettings, RunSettings
from metaloom.pipeline.estimation.config import processing_problems
from metaloom.pipeline.nn.optimization import LearningRate, OptimizerConfig
from metaloom.pipeline.nn.spec import BUILT_IN_NETWORKS
from metaloom.pipeline.policies.config import ActorKind
from metaloom.pipeline.schema import later


class RL2(AlgorithmSettings, LearningRate):
    """A recurrent policy that adapts to a task by what it remembers of its episodes there, trained by PPO."""

    graph: ClassVar[str] = "on_policy"
    learner: ClassVar[str] = "metaloom.pipeline.algorithms.rl2.learner:RL2Learner"
    actor: ClassVar[ActorKind] = "recurrent"
    decides_episodes: ClassVar[tuple[str, ...]] = ("episodes_per_trial",)

    name: Literal["rl2"] = "rl2"

    episodes_per_trial: int = Field(default=2, ge=1)
    """Episodes of a task, one after the other, through which the policy's memory lasts; episodes_per_task are those of
    one trial or of several."""
    num_epochs: int = Field(default=10, ge=1)
    """Passes over the trials of an iteration."""
    trials_per_minibatch: int = Field(default=16, ge=1)
    """Whole trials per gradient step; an epoch's steps are dealt into equal parts of at most so many."""
    clip_eps: float = Field(default=0.2, gt=0)
    """Clipping range ε of the likelihood ratio."""
    value_coeff: float = Field(default=0.5, gt=0)
    """Weight of the loss of the values, which are a layer on the policy's own memory."""
    entropy_coeff: float = Field(default=0.0, ge=0)
    """Weight of the policy's entropy, which is maximized."""
    max_grad_norm: float | None = Field(default=0.5, gt=0)
    """Longer gradients, of all parameters together, are shortened to this Euclidean norm."""
    initial_output_scale: float = Field(default=1.0, ge=0)
    """Multiplies the policy's output layer at the start. Near 0, what is remembered hardly learns at first, since the
    gradient reaches it through this layer."""
    optimizer: OptimizerConfig = later(OptimizerConfig(name="adam"))
    """Of all parameters together."""

    @property
    def run_defaults(self) -> Mapping[str, Any]:
        """One GRU, no baseline; see AlgorithmSettings."""
        return {
            "policy": {"network": "gru", "hidden_sizes": (128,)},
            "baseline": {"name": "zero"},
            "processing": {"gae_lambda": 0.95},
            "episodes_per_task": self.episodes_per_trial,
        }

    @property
    def trial(self) -> int:
        """See AlgorithmSettings."""
        return self.episodes_per_trial

    @property
    def evaluation_steps(self) -> int:
        """As many episodes as a trial has before its last one."""
        return self.episodes_per_trial - 1

    @property
    def evaluation_episodes(self) -> int:
        """One: after every episode the next."""
        return 1

    def problems(self, run: RunSettings) -> Iterator[str]:
        """See AlgorithmSettings."""
        if run.baseline.name != "zero":
            yield f"baseline is {run.baseline.name} but rl2 has values of its own instead; leave baseline out"
        if run.policy.name is not None:
            yield f"policy.name is {run.policy.name} but rl2 needs a memory; set policy.network to a class of your own"
        if run.policy.network in BUILT_IN_NETWORKS:
            yield (
                f"policy.network is {run.policy.network}, which has no memory; required gru, lstm, or module:Class of "
                "a network with a memory for rl2"
            )
        if run.samples_until_enough:
            yield "min_steps or min_rollouts is set but rl2 has as many episodes in every trial; leave them out"
        if run.episodes_per_task % self.episodes_per_trial:
            yield (
                f"episodes_per_task is {run.episodes_per_task} but a trial has {self.episodes_per_trial} episodes "
                "(algorithm.episodes_per_trial); required a multiple, whole trials of every task"
            )
        yield from processing_problems(run.processing, ("advantages",))

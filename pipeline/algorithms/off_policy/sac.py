"""Soft actor-critic (SAC) with a learned temperature. Haarnoja et al. 2018, arXiv:1801.01290 and arXiv:1812.05905."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from metaloom.pipeline.algorithms.off_policy.settings import LayerSize, ReplaySettings
from metaloom.pipeline.nn.optimization import OptimizerConfig
from metaloom.pipeline.policies.config import ActorKind
from metaloom.pipeline.schema import later


class SAC(ReplaySettings):
    """A squashed Gaussian policy that is to have high Q-values and entropy, and two Q-functions of it."""

    learner: ClassVar[str] = "metaloom.pipeline.algorithms.off_policy.sac_learner:SACLearner"
    actor: ClassVar[ActorKind] = "tanh_gaussian"

    name: Literal["sac"] = "sac"

    learning_rate: float = Field(default=3e-4, gt=0)
    """Step size of policy, Q-functions and temperature."""
    max_grad_norm: float | None = Field(default=5.0, gt=0)
    """Longer gradients are shortened to this Euclidean norm: the policy's, and that of both Q-functions together."""
    critic_hidden_sizes: tuple[LayerSize, ...] = Field(default=(256, 256), min_length=1)
    """Units in each hidden layer of the Q-functions."""
    tau: float = Field(default=0.995, ge=0, lt=1)
    """Weight of the old target in a change of the target networks."""
    ent_coeff_init: float = Field(default=0.2, gt=0)
    """The temperature α at the start."""
    learn_ent_coeff: bool = True
    """Adjust α until the policy's entropy is minus the number of action dimensions."""
    rew_scale: float = Field(default=1.0, gt=0)
    """Multiplies rewards, as the Q-functions learn them."""
    standardize_rew: bool = False
    """Shift and scale the rewards of every minibatch to mean 0 and deviation 1 before rew_scale."""
    optimizer: OptimizerConfig = later(OptimizerConfig(name="adam"))
    """Of policy, Q-functions and temperature, each with a state of its own; adam and rmsprop have an ε of 1e-5."""

    @property
    def run_defaults(self) -> Mapping[str, Any]:
        own = {"env": {"action_scale": 1.0}, "policy": {"hidden_sizes": (256, 256)}}
        return {**super().run_defaults, **own}

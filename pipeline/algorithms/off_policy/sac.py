"""Soft actor-critic (SAC) with a learned temperature. Haarnoja et al. 2018, arXiv:1801.01290 and arXiv:1812.05905."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from metaloom.pipeline.algorithms.off_policy.settings import LayerSize, OffPolicy
from metaloom.pipeline.policies.config import ActorKind

if TYPE_CHECKING:
    from metaloom.pipeline.algorithms.off_policy.sac_learner import SACLearner
    from metaloom.pipeline.estimation.config import ProcessingConfig


class SAC(OffPolicy):
    """A squashed Gaussian policy that is to have high Q-values and entropy, and two Q-functions of it."""

    run_defaults: ClassVar[Mapping[str, Any]] = {
        "num_tasks": 1,
        "episodes_per_task": 1,
        "env": {"action_scale": 1.0},
        "policy": {"hidden_sizes": (256, 256)},
        "baseline": {"name": "zero"},
    }
    """What a run means by leaving a setting out."""
    actor: ClassVar[ActorKind] = "tanh_gaussian"

    name: Literal["sac"] = "sac"

    learning_rate: float = Field(default=3e-4, gt=0)
    """Step size of Adam for policy, Q-functions and temperature."""
    max_grad_norm: float | None = Field(default=5.0, gt=0)
    """Longer gradients are shortened to this Euclidean norm: the policy's, and that of both Q-functions together."""
    critic_hidden_sizes: tuple[LayerSize, ...] = Field(default=(256, 256), min_length=1)
    """Units in each hidden layer of the Q-functions."""
    tau: float = Field(default=0.995, ge=0, lt=1)
    """Weight of the old target in a change of the target networks."""
    ent_coeff_init: float = Field(default=0.2, gt=0)
    """The temperature α at the start."""
    learn_ent_coeff: bool = True
    """Whether α is adjusted until the policy's entropy is minus the number of action dimensions."""
    rew_scale: float = Field(default=1.0, gt=0)
    """Multiplies rewards, as the Q-functions learn them."""
    standardize_rew: bool = False
    """Shift and scale the rewards of every minibatch to mean 0 and deviation 1 before rew_scale."""

    def build(self, processing: ProcessingConfig) -> SACLearner:
        """The algorithm that these settings describe, for rewards discounted as `processing` says."""
        from metaloom.pipeline.algorithms.off_policy.sac_learner import SACLearner

        return SACLearner(self, processing.discount)

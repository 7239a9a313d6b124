"""PEARL: probabilistic embeddings for actor-critic RL. Rakelly et al. 2019, arXiv:1903.08254."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from metaloom.pipeline.algorithms.pearl.rounds import Round, episodes_of, posterior_rounds
from metaloom.pipeline.schema import Settings

if TYPE_CHECKING:
    from metaloom.pipeline.algorithms.pearl.learner import PEARLLearner
    from metaloom.pipeline.estimation.config import ProcessingConfig

LayerSize = Annotated[int, Field(ge=1)]

RUN_DEFAULTS: Mapping[str, Any] = {
    "iterations": 500,
    "num_tasks": 5,
    "episodes_per_task": 1,
    "max_episode_steps": 200,
    "env": {"action_scale": 1.0},
    "policy": {"hidden_sizes": (300, 300, 300)},
    "baseline": {"name": "zero"},
}
"""What a run means by leaving a setting out."""
ROUNDS = ("num_steps_prior", "num_steps_posterior", "num_extra_rl_steps_posterior", "update_post_train")
"""Settings that decide the rounds of an iteration."""


class PEARL(Settings):
    """Soft actor-critic given a latent variable, which is inferred from a few of a task's transitions."""

    off_policy: ClassVar[bool] = True
    infers_tasks: ClassVar[bool] = True
    has_critic: ClassVar[bool] = False
    inner_steps: ClassVar[int] = 2
    learns_from: ClassVar[tuple[str, ...]] = ()
    run_defaults: ClassVar[Mapping[str, Any]] = RUN_DEFAULTS
    actor: ClassVar[Literal["tanh_gaussian"]] = "tanh_gaussian"
    sizes: ClassVar[tuple[str, ...]] = (
        *ROUNDS,
        "num_updates",
        "meta_batch_size",
        "batch_size",
        "embedding_batch_size",
    )
    """Settings that decide the shapes of what an iteration stores."""
    decides_episodes: ClassVar[tuple[str, ...]] = (*ROUNDS, "num_initial_steps", "num_exp_traj_eval")
    """Settings that decide which episodes are collected, and nothing else."""

    name: Literal["pearl"] = "pearl"

    # Networks.
    latent_size: int = Field(default=5, ge=1)
    """Dimensions of the latent variable z that stands for a task."""
    encoder_hidden_sizes: tuple[LayerSize, ...] = Field(default=(200, 200, 200), min_length=1)
    """Units in each hidden layer of the encoder, which sees one transition at a time."""
    critic_hidden_sizes: tuple[LayerSize, ...] = Field(default=(300, 300, 300), min_length=1)
    """Units in each hidden layer of both Q functions and of V."""
    use_information_bottleneck: bool = True
    """Infer a Gaussian over z, kept near N(0, I); otherwise one z, the mean of the encoder's outputs."""
    use_next_obs_in_context: bool = False
    """Show the encoder next observations too, which tasks that differ in their dynamics need."""
    sparse_rewards: bool = False
    """Infer tasks from the environment's sparse rewards, while actor and critics learn from the dense ones."""

    # Losses.
    kl_weight: float = Field(default=0.1, ge=0)
    """Weight of KL(q(z|c) ‖ N(0, I)), summed over a gradient step's tasks: half the tasks want twice the weight."""
    reward_scale: float = Field(default=5.0, gt=0)
    """Multiplies rewards in the critics' targets. The entropy has weight 1, so this sets how much is explored."""
    policy_mean_reg: float = Field(default=1e-3, ge=0)
    """Weight of the mean of squared means of the policy, before the tanh."""
    policy_std_reg: float = Field(default=1e-3, ge=0)
    """Weight of the mean of squared log standard deviations of the policy: it pulls them towards 1."""
    policy_pre_activation_reg: float = Field(default=0.0, ge=0)
    """Weight of the squared norm of actions before the tanh, mean over transitions."""

    # Optimization.
    policy_learning_rate: float = Field(default=3e-4, gt=0)
    """Adam's step size of the policy."""
    q_learning_rate: float = Field(default=3e-4, gt=0)
    """Adam's step size of both Q functions."""
    v_learning_rate: float = Field(default=3e-4, gt=0)
    """Adam's step size of V."""
    encoder_learning_rate: float = Field(default=3e-4, gt=0)
    """Adam's step size of the encoder."""
    soft_target_tau: float = Field(default=0.005, gt=0, le=1)
    """Weight of V in the target V that every gradient step moves towards it."""
    num_updates: int = Field(default=2000, ge=1)
    """Gradient steps per iteration."""
    meta_batch_size: int = Field(default=16, ge=1)
    """Tasks per gradient step."""
    batch_size: int = Field(default=256, ge=1)
    """Transitions of each of them that actor and critics learn from."""
    embedding_batch_size: int = Field(default=100, ge=1)
    """Transitions of each of them that it is inferred from."""
    memory_size: int = Field(default=1_000_000, ge=1)
    """Transitions per task that are remembered; older ones are forgotten."""

    # Collection and evaluation.
    num_initial_steps: int = Field(default=2000, ge=1)
    """Environment steps of every training task before the first iteration, by the prior."""
    num_steps_prior: int = Field(default=400, ge=0)
    """Steps per task and iteration by the prior."""
    num_steps_posterior: int = Field(default=0, ge=0)
    """Steps per task and iteration by the posterior, which tasks are inferred from as well."""
    num_extra_rl_steps_posterior: int = Field(default=600, ge=0)
    """Steps per task and iteration by the posterior, for actor and critics alone."""
    update_post_train: int = Field(default=1, ge=1)
    """Episodes by one posterior; then it is inferred anew."""
    num_exp_traj_eval: int = Field(default=1, ge=1)
    """Episodes of an evaluation by the prior, before the task is inferred for the first time."""

    @model_validator(mode="after")
    def _some_round_is_context(self) -> PEARL:
        if not self.num_steps_prior and not self.num_steps_posterior:
            raise ValueError(
                "num_steps_prior and num_steps_posterior are both 0, so there is nothing to infer tasks from; set one "
                "of them to at least 1"
            )
        return self

    def initial_episodes(self, max_episode_steps: int) -> int:
        """Episodes of every training task before the first iteration."""
        return episodes_of(self.num_initial_steps, max_episode_steps)

    def rounds(self, max_episode_steps: int) -> tuple[Round, ...]:
        """What an iteration collects of each of its tasks, in order.

        The numbers of steps are rounded up to whole episodes of full length. Every phase starts from the prior.
        """
        prior, posterior, extra = (
            episodes_of(steps, max_episode_steps)
            for steps in (self.num_steps_prior, self.num_steps_posterior, self.num_extra_rl_steps_posterior)
        )
        return (
            *((Round(prior, from_posterior=False, in_context=True),) if prior else ()),
            *posterior_rounds(posterior, self.update_post_train, in_context=True),
            *posterior_rounds(extra, self.update_post_train, in_context=False),
        )

    def build(self, processing: ProcessingConfig) -> PEARLLearner:
        """The algorithm that these settings describe, for rewards discounted as `processing` says."""
        from metaloom.pipeline.algorithms.pearl.learner import PEARLLearner

        return PEARLLearner(self, processing.discount)

"""PEARL: probabilistic embeddings for actor-critic RL. Rakelly et al. 2019, arXiv:1903.08254."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from metaloom.pipeline.algorithms.contract import AlgorithmSettings, RunSettings
from metaloom.pipeline.algorithms.off_policy.settings import CollectionRound, Filling, OffPolicyPlan, OffPolicySettings
from metaloom.pipeline.nn.optimization import OptimizerConfig, ScheduledSteps
from metaloom.pipeline.policies.config import ActorKind, LayerSize
from metaloom.pipeline.schema import later

ROUNDS = ("num_steps_prior", "num_steps_posterior", "num_extra_rl_steps_posterior", "update_post_train")
"""Names of the settings that determine what an iteration collects."""
_MOST_ROUNDS = 1000


class PEARL(ScheduledSteps, OffPolicySettings, AlgorithmSettings):
    """PEARL: soft actor-critic conditioned on a latent variable inferred from a sample of the task's transitions."""

    graph: ClassVar[str] = "task_inference"
    learner: ClassVar[str] = "metaloom.pipeline.algorithms.pearl.learner:PEARLLearner"
    actor: ClassVar[ActorKind] = "tanh_gaussian"
    sizes: ClassVar[tuple[str, ...]] = (*ROUNDS, "num_updates", "meta_batch_size", "batch_size", "embedding_batch_size")
    decides_episodes: ClassVar[tuple[str, ...]] = (*ROUNDS, "num_initial_steps", "num_exp_traj_eval")
    adaptation_steps: ClassVar[int] = 2

    name: Literal["pearl"] = "pearl"

    # Networks.
    latent_size: int = Field(default=5, ge=1)
    """Dimension of a task's latent variable z."""
    encoder_hidden_sizes: tuple[LayerSize, ...] = (200, 200, 200)
    """Units in each hidden layer of the encoder, whose input is one transition."""
    critic_hidden_sizes: tuple[LayerSize, ...] = (300, 300, 300)
    """Units in each hidden layer of both Q-functions and of V."""
    use_information_bottleneck: bool = True
    """Infer a Gaussian over z, regularized toward N(0, I). If off, z is the mean of the encoder's outputs."""
    use_next_obs_in_context: bool = False
    """Include next observations in the encoder's input. Needed if tasks differ in dynamics."""
    sparse_rewards: bool = False
    """Infer tasks from the environment's sparse rewards, while the actor and the critics learn from dense rewards."""

    # Losses.
    kl_weight: float = Field(default=0.1, ge=0)
    """Weight of KL(q(z|c) ‖ N(0, I)), summed over the tasks of a gradient step. If you halve meta_batch_size,
    double the weight."""
    reward_scale: float = Field(default=5.0, gt=0)
    """Scale factor for rewards in the critics' targets. Entropy has weight 1, so this controls exploration."""
    policy_mean_reg: float = Field(default=1e-3, ge=0)
    """Weight of the policy's mean squared action mean, before the tanh."""
    policy_std_reg: float = Field(default=1e-3, ge=0)
    """Weight of the policy's mean squared log standard deviation, which pulls standard deviations toward 1."""
    policy_pre_activation_reg: float = Field(default=0.0, ge=0)
    """Weight of the squared norm of pre-tanh actions, averaged over transitions."""

    # Optimization.
    policy_learning_rate: float = Field(default=3e-4, gt=0)
    """Step size of the policy."""
    q_learning_rate: float = Field(default=3e-4, gt=0)
    """Step size of both Q-functions."""
    v_learning_rate: float = Field(default=3e-4, gt=0)
    """Step size of V."""
    encoder_learning_rate: float = Field(default=3e-4, gt=0)
    """Step size of the encoder."""
    optimizer: OptimizerConfig = later(OptimizerConfig(name="adam"))
    """Optimizer for all networks, with separate state for each; adam and rmsprop use ε = 1e-8."""
    soft_target_tau: float = Field(default=0.005, gt=0, le=1)
    """Weight of V in the target network's update after each gradient step."""
    num_updates: int = Field(default=2000, ge=1)
    """Gradient steps per iteration."""
    meta_batch_size: int = Field(default=16, ge=1)
    """Tasks per gradient step."""
    batch_size: int = Field(default=256, ge=1)
    """Transitions per task and gradient step for the actor and the critics."""
    embedding_batch_size: int = Field(default=100, ge=1)
    """Transitions per task and gradient step for task inference."""
    memory_size: int = Field(default=1_000_000, ge=1)
    """Capacity of each task's replay buffer, in transitions."""

    # Collection and evaluation.
    num_initial_steps: int = Field(default=2000, ge=1)
    """Environment steps per training task collected under the prior before the first iteration."""
    num_steps_prior: int = Field(default=400, ge=0)
    """Steps per task and iteration under the prior."""
    num_steps_posterior: int = Field(default=0, ge=0)
    """Steps per task and iteration under the posterior; also used for task inference."""
    num_extra_rl_steps_posterior: int = Field(default=600, ge=0)
    """Steps per task and iteration under the posterior, for the actor and the critics only."""
    update_post_train: int = Field(default=1, ge=1)
    """Number of episodes after which the task is inferred again."""
    num_exp_traj_eval: int = Field(default=1, ge=1)
    """Episodes that an evaluation collects under the prior before the first inference."""

    @model_validator(mode="after")
    def _some_round_is_context(self) -> "PEARL":
        if not self.num_steps_prior and not self.num_steps_posterior:
            raise ValueError(
                "num_steps_prior and num_steps_posterior are both 0, so there is nothing to infer tasks from; set one "
                "of them to at least 1"
            )
        return self

    @property
    def run_defaults(self) -> Mapping[str, Any]:
        return {
            "iterations": 500,
            "num_tasks": 5,
            "episodes_per_task": 1,
            "max_episode_steps": 200,
            "env": {"action_scale": 1.0},
            "policy": {"hidden_sizes": (300, 300, 300)},
            "baseline": {"name": "zero"},
        }

    def plan(self, *, episodes_per_task: int, max_episode_steps: int) -> OffPolicyPlan:
        """Return a plan with all step counts rounded up to full-length episodes."""
        return OffPolicyPlan(
            Filling(self.actor, episodes=_episodes(self.num_initial_steps, max_episode_steps)),
            self.rounds(max_episode_steps),
            self.num_updates,
            tasks_per_gradient_step=self.meta_batch_size,
            batch_size=self.batch_size,
            context_size=self.embedding_batch_size,
            memory_size=self.memory_size,
            scores_sparse_rewards=self.sparse_rewards,
        )

    def rounds(self, max_episode_steps: int) -> tuple[CollectionRound, ...]:
        """Return the collection rounds of an iteration, in order. Each of the three phases starts from the prior."""
        prior, posterior, extra = (
            _episodes(steps, max_episode_steps)
            for steps in (self.num_steps_prior, self.num_steps_posterior, self.num_extra_rl_steps_posterior)
        )
        return (
            *((CollectionRound(prior, in_context=True),) if prior else ()),
            *_posterior_rounds(posterior, self.update_post_train, in_context=True),
            *_posterior_rounds(extra, self.update_post_train, in_context=False),
        )

    def problems(self, run: RunSettings) -> Iterator[str]:
        yield from super().problems(run)
        for name in ("num_steps_posterior", "num_extra_rl_steps_posterior"):
            rounds = _episodes(getattr(self, name), run.max_episode_steps) // self.update_post_train
            if rounds > _MOST_ROUNDS:
                yield (
                    f"algorithm.{name} is {getattr(self, name)}, which makes {rounds} rollout batches per iteration; "
                    f"at most {_MOST_ROUNDS} are allowed: lower it, or raise update_post_train"
                )
        if run.episodes_per_task != 1:
            yield (
                f"episodes_per_task is {run.episodes_per_task} but {self.name} collects by steps; remove it and set "
                "algorithm.num_steps_prior, num_steps_posterior and num_extra_rl_steps_posterior"
            )
        if run.samples_until_enough:
            yield (
                f"min_steps or min_rollouts is set, but {self.name} needs the same number of episodes for every "
                "task; remove both"
            )


def _episodes(num_steps: int, max_episode_steps: int) -> int:
    """Return the number of episodes needed for `num_steps` steps if none ends early."""
    return -(-num_steps // max_episode_steps)


def _posterior_rounds(episodes: int, update_every: int, *, in_context: bool) -> Iterator[CollectionRound]:
    """Yield the rounds of a phase that infers the task every `update_every` episodes; the first uses the prior."""
    for start in range(0, episodes, update_every):
        yield CollectionRound(min(update_every, episodes - start), from_posterior=start > 0, in_context=in_context)

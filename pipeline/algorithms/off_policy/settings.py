"""Plans for algorithms with a replay buffer, and settings for DQL and SAC."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, Field, model_validator

from metaloom.pipeline.algorithms.contract import AlgorithmSettings, RunSettings
from metaloom.pipeline.estimation.config import ProcessingConfig
from metaloom.pipeline.nn.optimization import LearningRate, OptimizerConfig
from metaloom.pipeline.policies.config import ActorKind, LayerSize
from metaloom.pipeline.schema import later


@dataclass(frozen=True)
class Filling:
    """Initial fill of the replay buffer, either in environment steps or in episodes per training task."""

    actor: ActorKind  # uniform, or the algorithm's actor with `OffPolicyLearner.filling_params`
    steps: int | None = None
    episodes: int | None = None


@dataclass(frozen=True)
class CollectionRound:
    """Episodes that an iteration collects in one task with one policy."""

    episodes: int  # maximum number of episodes; with task inference, each has its own latent variable
    from_posterior: bool = False  # infer the task first, from the iteration's episodes so far
    in_context: bool = False  # infer tasks from these episodes, besides learning from them


@dataclass(frozen=True)
class OffPolicyPlan:
    """An off-policy algorithm's plan for the stages: which episodes to collect and which transitions to draw."""

    filling: Filling
    rounds: tuple[CollectionRound, ...]  # collection rounds of an iteration in each task, in order
    num_updates: int | None  # gradient steps per iteration; None for one per environment step of the iteration
    tasks_per_gradient_step: int  # number of tasks K in each gradient step
    batch_size: int  # transitions N per task and gradient step
    context_size: int  # transitions C from which each task is inferred; 0 without inference
    memory_size: int  # capacity of the replay buffer in transitions, per task if tasks are inferred
    scores_sparse_rewards: bool = False  # evaluations score the environment's sparse rewards

    def gradient_steps(self, num_env_steps: int) -> int:
        """Return the number of gradient steps after an iteration collects `num_env_steps` environment steps."""
        return num_env_steps if self.num_updates is None else self.num_updates

    def most_transitions(self, *, iterations: int, num_tasks: int, all_tasks: int, max_episode_steps: int) -> int:
        """Return an upper bound on the transitions in the buffer: its capacity, or the run's total if that is less."""
        # The last filling episodes run in parallel and may double the requested number of steps.
        filled = 2 * (self.filling.steps or 0) + (all_tasks * (self.filling.episodes or 0) + 1) * max_episode_steps
        collected = num_tasks * sum(part.episodes for part in self.rounds) * max_episode_steps
        return min(self.memory_size * all_tasks, filled + iterations * collected)


class OffPolicySettings(BaseModel):
    """Settings for an algorithm that learns from the transitions of all iterations so far."""

    graph: ClassVar[str] = "off_policy"
    actor: ClassVar[ActorKind]

    def plan(self, *, episodes_per_task: int, max_episode_steps: int) -> OffPolicyPlan:
        """Return the plan for a run with these episode counts and lengths."""
        raise NotImplementedError

    def problems(self, run: RunSettings) -> Iterator[str]:
        name = run.algorithm.name
        if run.baseline.name != "zero":
            yield f"baseline is {run.baseline.name} but {name} learns from single transitions; remove baseline"
        for field, about in ProcessingConfig.model_fields.items():
            value = getattr(run.processing, field)
            if field not in ("name", "discount") and value != about.default:
                yield (
                    f"processing.{field} is {value} but {name} learns from single transitions, for which only "
                    "processing.discount applies; remove it"
                )
        if run.processing.name != "advantages":
            yield f"processing.name is {run.processing.name} but {name} learns from single transitions; remove it"
        if run.policy.name is not None:
            yield f"policy.name is {run.policy.name} but {name} has its own distributions; remove it"
        if options := run.policy.std_options:
            yield f"policy: {options} applies to Gaussian policies only, and {name} has none; remove it"


class ReplaySettings(LearningRate, OffPolicySettings):
    """Settings for the replay buffer and the gradient steps of DQL and SAC."""

    sizes: ClassVar[tuple[str, ...]] = ("batch_size", "num_updates_per_step")
    decides_episodes: ClassVar[tuple[str, ...]] = ("num_init_memory_steps", "use_trained_policy_for_refill")

    memory_size: int = Field(default=100_000, ge=1)
    """Capacity of the replay buffer in environment steps."""
    num_init_memory_steps: int | None = Field(default=None, ge=1)
    """Environment steps before the first update, clipped to [batch_size, memory_size]; the default is memory_size."""
    use_trained_policy_for_refill: bool = False
    """With init_from: fill the buffer with the loaded policy instead of random actions."""
    batch_size: int = Field(default=256, ge=1)
    """Transitions per gradient step."""
    num_updates_per_step: int | None = Field(default=None, ge=1)
    """Gradient steps per iteration; by default, one per environment step of the iteration."""
    target_update_intvl: int = Field(default=1, ge=1)
    """Gradient steps between updates of the target networks, counted over the run."""
    max_grad_norm: float | None = Field(default=None, gt=0)
    """Maximum Euclidean norm of the gradient; longer gradients are rescaled."""

    @model_validator(mode="after")
    def _a_batch_fits_into_the_memory(self) -> "ReplaySettings":
        if self.memory_size < self.batch_size:
            raise ValueError(
                f"memory_size is {self.memory_size} but batch_size is {self.batch_size}, so a batch would repeat "
                "transitions; raise memory_size or lower batch_size"
            )
        return self

    @property
    def init_memory_steps(self) -> int:
        if self.num_init_memory_steps is None:
            return self.memory_size
        return max(min(self.num_init_memory_steps, self.memory_size), self.batch_size)

    @property
    def run_defaults(self) -> Mapping[str, Any]:
        return {"num_tasks": 1, "episodes_per_task": 1, "baseline": {"name": "zero"}}

    def plan(self, *, episodes_per_task: int, max_episode_steps: int) -> OffPolicyPlan:
        """Return a plan that prefills the buffer and then collects one round of episodes per iteration."""
        return OffPolicyPlan(
            Filling(self.actor if self.use_trained_policy_for_refill else "uniform", steps=self.init_memory_steps),
            (CollectionRound(episodes_per_task),),
            self.num_updates_per_step,
            tasks_per_gradient_step=1,
            batch_size=self.batch_size,
            context_size=0,
            memory_size=self.memory_size,
        )

    def problems(self, run: RunSettings) -> Iterator[str]:
        name = run.algorithm.name
        yield from super().problems(run)
        if self.use_trained_policy_for_refill and not run.starts_warm:
            yield (
                "algorithm.use_trained_policy_for_refill is on but init_from names no run to take the policy from; "
                "set init_from or remove it"
            )
        if run.num_tasks != 1:
            yield f"num_tasks is {run.num_tasks} but {name} learns one task; remove num_tasks"


class DQL(ReplaySettings, AlgorithmSettings):
    """Deep Q-learning for discrete actions, with ε-greedy exploration. Mnih et al. 2015, doi:10.1038/nature14236."""

    learner: ClassVar[str] = "metaloom.pipeline.algorithms.off_policy.dql:DQLLearner"
    actor: ClassVar[ActorKind] = "q_values"
    decides_episodes: ClassVar[tuple[str, ...]] = (
        *ReplaySettings.decides_episodes,
        "eps_init",
        "eps_final",
        "eps_schedule_gamma",
    )

    name: Literal["dql"] = "dql"

    learning_rate: float = Field(default=5e-4, gt=0)
    """Step size of the optimizer."""
    target_update_intvl: int = Field(default=5, ge=1)
    """Gradient steps between copies of the Q-function to the target network, counted over the run."""
    max_grad_norm: float | None = Field(default=0.5, gt=0)
    """Maximum Euclidean norm of the gradient; longer gradients are rescaled."""
    eps_init: float = Field(default=1.0, ge=0, le=1)
    """Probability ε of a random action in the first iteration."""
    eps_final: float = Field(default=0.05, ge=0, le=1)
    """Lower limit of ε."""
    eps_schedule_gamma: float = Field(default=0.99, gt=0, lt=1)
    """Factor by which ε - eps_final decays per iteration."""
    optimizer: OptimizerConfig = later(OptimizerConfig(name="rmsprop"))
    """Optimizer for the Q-function; adam and rmsprop use ε = 1e-5."""

    @model_validator(mode="after")
    def _epsilon_does_not_rise(self) -> "DQL":
        if self.eps_final > self.eps_init:
            raise ValueError(f"eps_final is {self.eps_final} but eps_init is {self.eps_init}; lower eps_final")
        return self

    @property
    def run_defaults(self) -> Mapping[str, Any]:
        return {**super().run_defaults, "env": {"action_scale": None}}

    def epsilon(self, num_updates: int) -> float:
        """Return the probability of a random action in the iteration after `num_updates` updates."""
        return self.eps_final + (self.eps_init - self.eps_final) * self.eps_schedule_gamma**num_updates


class SAC(ReplaySettings, AlgorithmSettings):
    """Soft actor-critic: a squashed Gaussian policy, two Q-functions and a learned temperature.

    Haarnoja et al. 2018, arXiv:1801.01290 and arXiv:1812.05905.
    """

    learner: ClassVar[str] = "metaloom.pipeline.algorithms.off_policy.sac:SACLearner"
    actor: ClassVar[ActorKind] = "tanh_gaussian"

    name: Literal["sac"] = "sac"

    learning_rate: float = Field(default=3e-4, gt=0)
    """Step size for the policy, the Q-functions and the temperature."""
    max_grad_norm: float | None = Field(default=5.0, gt=0)
    """Maximum Euclidean norm of the policy's gradient, and of the Q-functions' joint gradient."""
    critic_hidden_sizes: tuple[LayerSize, ...] = (256, 256)
    """Units in each hidden layer of the Q-functions."""
    tau: float = Field(default=0.995, ge=0, lt=1)
    """Weight of the old parameters in an update of the target networks."""
    ent_coeff_init: float = Field(default=0.2, gt=0)
    """Initial temperature α."""
    learn_ent_coeff: bool = True
    """Adjust α so that the policy's entropy approaches minus the number of action dimensions."""
    rew_scale: float = Field(default=1.0, gt=0)
    """Scale factor for rewards in the Q-functions' targets."""
    standardize_rew: bool = False
    """Standardize each minibatch's rewards to mean 0 and standard deviation 1 before applying rew_scale."""
    optimizer: OptimizerConfig = later(OptimizerConfig(name="adam"))
    """Optimizer for policy, Q-functions and temperature, with separate states; adam and rmsprop use ε = 1e-5."""

    @property
    def run_defaults(self) -> Mapping[str, Any]:
        own = {"env": {"action_scale": 1.0}, "policy": {"hidden_sizes": (256, 256)}}
        return {**super().run_defaults, **own}

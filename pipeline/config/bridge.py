"""What RunConfig asks of algorithms that are not AlgorithmSettings yet. It goes when all are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from metaloom.pipeline.algorithms.contract import AlgorithmSettings
from metaloom.pipeline.estimation.config import ProcessingConfig, processing_problems

if TYPE_CHECKING:
    from metaloom.pipeline.config.run import RunConfig

_PROCESSING = ProcessingConfig()


def run_defaults(algorithm: Any) -> Mapping[str, Any]:
    if isinstance(algorithm, AlgorithmSettings):
        return algorithm.run_defaults
    dice = {"processing": {"name": "dice"}} if "adjusted_rewards" in algorithm.learns_from else {}
    return {**getattr(algorithm, "run_defaults", {}), **dice}


def adaptation_steps(algorithm: Any) -> int:
    return algorithm.adaptation_steps if isinstance(algorithm, AlgorithmSettings) else algorithm.inner_steps


def problems_of(config: RunConfig) -> Iterator[str]:
    if isinstance(config.algorithm, AlgorithmSettings):
        yield from config.algorithm.problems(config)
        return
    if config.samples_until_enough and not (config.has_critic or (config.off_policy and not config.infers_tasks)):
        yield (
            f"min_steps or min_rollouts is set, but {config.algorithm.name} learns from equally many episodes of "
            "every task; leave both out"
        )
    if config.off_policy:
        yield from _off_policy_problems(config)
    yield from _critic_problems(config)
    minibatches = getattr(config.algorithm, "num_minibatches", 1)
    steps_per_task = config.episodes_per_task * config.max_episode_steps
    if minibatches > steps_per_task:
        yield (
            f"algorithm.num_minibatches is {minibatches} but a task has at most {steps_per_task} steps "
            "(episodes_per_task * max_episode_steps); use at most that many"
        )
    learns_from = getattr(config.algorithm, "learns_from", ("advantages",))
    if "adjusted_rewards" in learns_from and minibatches > config.episodes_per_task:
        yield (
            f"algorithm.num_minibatches is {minibatches} but episodes_per_task is {config.episodes_per_task} and "
            f"{config.algorithm.name} takes whole episodes; use at most that many"
        )
    for problem in processing_problems(config.processing, learns_from):
        yield f"{problem} (algorithm.name is {config.algorithm.name})"


def _critic_problems(config: RunConfig) -> Iterator[str]:
    if config.has_critic and config.baseline.name != "zero":
        yield (
            f"baseline is {config.baseline.name} but {config.algorithm.name} has a critic instead; leave baseline out"
        )
    if getattr(config.algorithm, "advantage_scaling", "batch") == "running":
        if not config.processing.normalize_advantages:
            yield (
                "algorithm.advantage_scaling is running but processing.normalize_advantages is off, so nothing is "
                "scaled; leave one of them out"
            )
        if config.processing.adv_norm != "std":
            yield (
                f"processing.adv_norm is {config.processing.adv_norm} but algorithm.advantage_scaling is running, "
                "which divides by the standard deviation; leave one of them out"
            )
    particles = getattr(config.algorithm, "num_particles", 1)
    if config.algorithm.name == "svpg" and config.num_tasks != particles:
        yield (
            f"num_tasks is {config.num_tasks} but algorithm.num_particles is {particles}, and particles take the "
            "places of tasks; leave num_tasks out"
        )


def _off_policy_problems(config: RunConfig) -> Iterator[str]:
    """What an off-policy algorithm has no use for, in words that say what to do."""
    name = config.algorithm.name
    if config.baseline.name != "zero":
        yield f"baseline is {config.baseline.name} but {name} learns from single transitions; leave baseline out"
    for field in ProcessingConfig.model_fields:
        value = getattr(config.processing, field)
        if field not in ("name", "discount") and value != getattr(_PROCESSING, field):
            yield (
                f"processing.{field} is {value} but {name} learns from single transitions, of which only "
                "processing.discount is a setting; leave it out"
            )
    if options := config.policy.std_options:
        yield f"policy: {options} is for a Gaussian policy, which {name} has none of; leave it out"
    if getattr(config.algorithm, "use_trained_policy_for_refill", False) and config.init_from is None:
        yield (
            "algorithm.use_trained_policy_for_refill is on but init_from names no run whose policy that is; set "
            "init_from or leave it out"
        )
    if config.infers_tasks:
        if config.episodes_per_task != 1:
            yield (
                f"episodes_per_task is {config.episodes_per_task} but {name} collects by steps; leave it out and set "
                "algorithm.num_steps_prior, num_steps_posterior and num_extra_rl_steps_posterior"
            )
    elif config.num_tasks != 1:
        yield f"num_tasks is {config.num_tasks} but {name} learns one task; leave num_tasks out"

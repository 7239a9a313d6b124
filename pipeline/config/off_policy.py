"""What of a run's settings does not fit an off-policy algorithm."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from metaloom.pipeline.estimation.config import ProcessingConfig

if TYPE_CHECKING:
    from metaloom.pipeline.config.run import RunConfig

_PROCESSING = ProcessingConfig()


def off_policy_problems(config: RunConfig) -> Iterator[str]:
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

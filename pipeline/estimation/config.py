"""Settings for computing returns and advantages."""

from collections.abc import Iterator, Sequence
from typing import Literal

from pydantic import Field, model_validator

from metaloom.pipeline.baselines.config import BaselineField
from metaloom.pipeline.schema import Settings, later

ValueTarget = Literal["td_lambda", "empirical"]
"""Targets of a critic: its own values plus advantages, or the observed discounted returns."""
_DICE_OPTIONS = {"dice_norm": "real", "return_baseline": None}


class ProcessingConfig(Settings):
    """Settings for computing returns and advantages from rewards."""

    name: Literal["advantages", "dice"] = "advantages"
    """dice adds adjusted rewards for the DiCE losses. Set by the algorithm; do not set it yourself."""
    discount: float = Field(default=0.99, ge=0, le=1)
    """Discount γ per environment step."""
    gae_lambda: float = Field(default=1.0, ge=0, le=1)
    """λ of generalized advantage estimation; 1: returns minus values."""
    normalize_advantages: bool = True
    """Normalize advantages and adjusted rewards to zero mean and unit standard deviation per task."""
    positive_advantages: bool = False
    """Shift each task's advantages and adjusted rewards so that the smallest is 1e-8."""
    return_baseline: BaselineField | None = None
    """With name=dice: baseline used to compute advantages; `baseline` then predicts discounted rewards."""
    adv_norm: Literal["std", "variance"] = "std"
    """Divisor used in normalization. variance is for comparison with garage; it does not give tasks a common scale."""
    dice_norm: Literal["real", "padded"] = "real"
    """Steps over which statistics are computed. padded counts padding as zeros, for comparison with the ProMP code."""
    scale_rewards: bool = later(False)
    """Divide rewards by the running standard deviation of discounted returns and clip to ±10. Statistics are part of
    the learner state and constant within an iteration. Stored rewards and average_return are not scaled."""

    @model_validator(mode="after")
    def _norms_have_something_to_do(self) -> "ProcessingConfig":
        if self.adv_norm != "std" and not self.normalize_advantages:
            raise ValueError(f"adv_norm is {self.adv_norm} but normalize_advantages is off; remove one of them")
        if self.dice_norm != "real" and not (self.normalize_advantages or self.positive_advantages):
            raise ValueError(f"dice_norm is {self.dice_norm} but nothing is normalized or shifted; remove it")
        return self


def processing_problems(processing: ProcessingConfig, learns_from: Sequence[str]) -> Iterator[str]:
    """Yield conflicts between these settings and an algorithm that learns from the given fields of Samples."""
    needed = "dice" if "adjusted_rewards" in learns_from else "advantages"
    changed = [name for name, default in _DICE_OPTIONS.items() if getattr(processing, name) != default]
    if processing.name != needed:
        yield f"processing.name is {processing.name} but the algorithm needs {needed}; remove processing.name"
    elif needed == "advantages":
        yield from (f"processing.{name} is set but applies to DiCE only; remove it" for name in changed)
    elif "advantages" not in learns_from:
        unused = ["gae_lambda"] * (processing.gae_lambda != 1) + [name for name in changed if name != "dice_norm"]
        why = "the algorithm does not learn from advantages"
        yield from (f"processing.{name} is set but {why}; remove it" for name in unused)
    elif processing.return_baseline is None:
        yield (
            "processing.return_baseline is not set but the algorithm learns from advantages; set it to a baseline "
            "or to zero"
        )

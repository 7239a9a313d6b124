"""What an update of VariBAD learns from."""

from dataclasses import dataclass

from metaloom.pipeline.replay.trials import TrialBuffer
from metaloom.pipeline.types import Step


@dataclass(frozen=True)
class TrialExperience:
    """What an update learns from.

    Attributes:
        step: this iteration's trials, for the policy.
        buffer: trials of the last iterations, for the model.
    """

    step: Step
    buffer: TrialBuffer

"""Learning-rate schedules as functions of the number of updates."""

import math
from collections.abc import Callable, Mapping

import torch
from pydantic import JsonValue
from torch.optim.lr_scheduler import LRScheduler

from metaloom.pipeline.nn.optimization import FROM_A_COUNT, LearningRate, ScheduledSteps, TorchScheduler
from metaloom.pipeline.schema import ConfigError, suggestion

_REFUSALS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RuntimeError)
"""Exceptions raised by torch's schedulers for invalid options."""
LrFactor = Callable[[int], float]
"""Factor of the step sizes as a function of the number of updates."""

_SCHEDULERS: Mapping[str, Callable[..., LRScheduler]] = {
    name: value
    for name, value in vars(torch.optim.lr_scheduler).items()
    if isinstance(value, type) and issubclass(value, LRScheduler) and value is not LRScheduler and name[0] != "_"
}


def lr_factor(settings: LearningRate | ScheduledSteps, learning_rate: float) -> LrFactor:
    """Return the schedule of an algorithm's settings.

    Args:
        settings: Settings of the algorithm.
        learning_rate: Step size for schedulers of torch with absolute step sizes, such as OneCycleLR.

    Raises:
        ConfigError: the scheduler does not exist, rejects its options, or needs more than the number of updates. The
            schedule raises it for updates after its end.
    """
    schedule = settings.lr_schedule
    if not isinstance(schedule, TorchScheduler):
        horizon, decay = settings.lr_horizon, settings.lr_decay
        return lambda count: decay**count if horizon is None else max(0.0, 1 - count / horizon)
    if (scheduler := _SCHEDULERS.get(schedule.name)) is None:
        raise ConfigError(
            f"algorithm.lr_schedule: torch {torch.__version__} has no torch.optim.lr_scheduler.{schedule.name}; "
            f"required one such as {', '.join(FROM_A_COUNT)}{suggestion(schedule.name, _SCHEDULERS)}"
        )

    def factor_after(num_updates: int) -> float:
        try:
            return factor(num_updates)
        except _REFUSALS as error:  # such as after the end of a schedule
            raise _refused(schedule, f"after {num_updates} updates: {error}") from None

    try:
        factor = _TorchFactor(scheduler, schedule.options, learning_rate)
        # Some invalid options fail only in the first step.
        factor(1)
    except _REFUSALS as error:
        raise _refused(schedule, str(error)) from None
    return factor_after


def _refused(schedule: TorchScheduler, problem: str) -> ConfigError:
    return ConfigError(
        f"algorithm.lr_schedule: torch.optim.lr_scheduler.{schedule.name} with options {schedule.options}: {problem}"
    )


class _TorchFactor:
    """Factor of a torch scheduler. Schedulers only step forward, so an earlier update restarts it."""

    def __init__(
        self, scheduler: Callable[..., LRScheduler], options: Mapping[str, JsonValue], learning_rate: float
    ) -> None:
        self._make, self._options, self._learning_rate = scheduler, options, learning_rate
        self._start()

    def __call__(self, num_updates: int) -> float:
        """Return the factor after `num_updates` updates."""
        if num_updates < self._done:
            self._start()
        while self._done < num_updates:
            # Updates no parameter, but torch warns if a scheduler steps before its optimizer.
            self._optimizer.step()
            self._scheduler.step()
            self._done += 1
        factor = float(self._optimizer.param_groups[0]["lr"]) / self._learning_rate
        if not (math.isfinite(factor) and factor >= 0):
            raise ValueError(f"the step-size factor is {factor} from update {num_updates} on")
        return factor

    def _start(self) -> None:
        # Adadelta has no momentum: schedulers that cycle momentum fail unless that is turned off.
        self._optimizer = torch.optim.Adadelta([torch.zeros(1)], lr=self._learning_rate)
        self._scheduler = self._make(self._optimizer, **self._options)
        self._done = 0

"""Live loggers: a run's metrics in TensorBoard, Weights & Biases or MLflow while it trains.

Each is a module of this package with a function `open_logger`, and an extra of its name. They observe: what a logger
raises ends the logger, never the training.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal, get_args

from metaloom.flows.errors import ExtraMissing, UsageError

LoggerName = Literal["mlflow", "tensorboard", "wandb"]
"""Each is also the name of the package that it needs."""


@dataclass(frozen=True)
class LogPlan:
    """Additional logging targets of trainings.

    Attributes:
        names: Names of loggers.
        film_every: Film every N-th iteration, besides the last.
    """

    names: tuple[LoggerName, ...] = ()
    film_every: int | None = None


def check_loggers(names: Sequence[str], film_every: int | None) -> None:
    """Refuse what could only fail once a run has begun.

    Raises:
        UsageError: there is no such logger, the package that it needs is not installed, or films are asked for at
            iterations that there are not or without a logger to keep them.
    """
    for name in names:
        if name not in get_args(LoggerName):
            raise UsageError(f"found the logger {name}; required one of {', '.join(get_args(LoggerName))}")
        for package, module in ((name, name), ("pillow", "PIL")):  # which draws films
            if find_spec(module) is None:
                raise ExtraMissing(name, package)
    if film_every is not None and not names:
        raise UsageError("found films asked for without a logger to keep them; name one")

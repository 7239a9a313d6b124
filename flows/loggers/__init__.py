"""Live loggers, which send a run's metrics to TensorBoard, Weights & Biases, MLflow or a function during training.

The first three are modules of this package with a function `open_logger`; each requires the extra of the same name. A
custom function, or one from an installed package (entry points `metaloom.loggers`), is called with each
`FinishedIteration`. An error ends the logger, never the training.
"""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from metaloom.flows.errors import ExtraMissing, UsageError

if TYPE_CHECKING:
    from metaloom.flows.opened import FinishedIteration

MODULES = ("mlflow", "tensorboard", "wandb")  # built-in loggers; each requires the package of the same name


def check_loggers(names: Sequence[str], film_every: int | None) -> None:
    """Raise UsageError or ConfigError for an invalid or missing logger, or for `film_every` without any logger."""
    for name in names:
        if name not in MODULES:
            function_named(name)
            continue
        for package, module in ((name, name), ("pillow", "PIL")):  # Pillow draws videos
            if find_spec(module) is None:
                raise ExtraMissing(name, package)
    if film_every is not None and not names:
        raise UsageError("logging videos requires at least one logger")


def function_named(name: str) -> "Callable[[FinishedIteration], Any]":
    """Return the logger function for a path module:function or an entry point in the group `metaloom.loggers`."""
    from metaloom.pipeline.lazy import installed
    from metaloom.pipeline.plugins import load
    from metaloom.pipeline.shown import suggestion

    added = {point.name: point.value for point in installed("metaloom.loggers")}
    path = added.get(name, name)
    if ":" not in path:
        known = [*MODULES, *added]
        raise UsageError(
            f"unknown logger {name}; use one of {', '.join(known)}, or module:function{suggestion(name, known)}"
        )
    if not callable(found := load(path)):
        raise UsageError(f"the logger {name} is a {type(found).__name__}; it must be a function")
    return found

"""Export of stored runs to other formats, with one iteration in memory at a time. Folders appear atomically.

Each module in this package defines a format of the same name:

    FORMAT = ExportFormat(export_csv)

A user-defined format is module:FORMAT, or an entry point in the group `metaloom.exports`. A format's options are the
parameters of its function; other command options are rejected.
"""

import inspect
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from metaloom.flows.errors import UsageError, explained
from metaloom.pipeline.lazy import installed
from metaloom.pipeline.plugins import load, path_of
from metaloom.pipeline.shown import ConfigError, suggestion
from metaloom.storage import Run, argument
from metaloom.storage.export import Export, export_folder
from metaloom.storage.progress import Progress, unseen
from metaloom.storage.run import Iterations

By = Literal["task", "position"]
_OF_POLICIES = ("onnx", "pt2", "safetensors")


@dataclass(frozen=True)
class ExportFormat:
    """A format for exporting runs.

    Attributes:
        write: Function that writes a run to a new folder and updates the summary: `write(run, folder, done, *,
            iterations)`, with a parameter for each supported option: `steps`, `by`. Options that are not set are not
            passed. A format without `iterations` exports all complete iterations.
        holds_episodes: True if a run whose episodes are all thinned cannot be exported.
        grows: True if the folder may contain earlier exports; the function must then make its writes atomic.
    """

    write: Callable[..., None]
    holds_episodes: bool = False
    grows: bool = False

    def __post_init__(self) -> None:
        """Check the function's parameters. Raises TypeError if one is missing or unknown."""
        signature, options = inspect.signature(self.write), ("iterations", "steps", "by")
        try:
            signature.bind(None, None, None, **{name: None for name in options if self.takes(name)})
        except TypeError as problem:
            raise TypeError(
                f"{path_of(self.write)}{signature}: {problem}; it must take (run, folder, done) and any of "
                f"the keywords {', '.join(options)}"
            ) from None

    def takes(self, option: str) -> bool:
        """Return True if the format supports an option."""
        return option in inspect.signature(self.write).parameters

    def export(self, run: Run, out: Path, on_progress: Progress = unseen, **options: Any) -> Export:
        """Write a run to a new or empty folder atomically, or append it to the folder of a format that grows."""
        done = Export(out, progress=on_progress)
        if self.grows:
            self.write(run, out, done, **options)
            return done
        with export_folder(out) as folder:
            self.write(run, folder, done, **options)
        return done


def format_names() -> list[str]:
    """Return the names of built-in formats and of formats in installed packages, without importing them."""
    return sorted(_paths())


def _paths() -> dict[str, str]:
    """Return the import path of each export format, `module:FORMAT`, keyed by the format's name."""
    added = {point.name: point.value for point in installed("metaloom.exports")}
    return added | {module.name: f"{__name__}.{module.name}:FORMAT" for module in pkgutil.iter_modules(__path__)}


def format_of(name: str) -> ExportFormat:
    """Return the format with this name or import path, module:FORMAT; raise UsageError if there is none."""
    path = _paths().get(name, name)
    if ":" not in path:
        hint = suggestion(name, names := format_names())
        if name in _OF_POLICIES:
            hint = f". `metaloom policy RUN --out policy.{name}` writes the trained policy"
        raise UsageError(f"unknown format --to {name}; use one of {', '.join(names)}, or module:FORMAT{hint}")
    try:
        found = load(path)
    except ConfigError as error:
        if path.startswith(f"{__name__}.") and isinstance(missing := error.__cause__, ModuleNotFoundError):
            raise explained(missing) from None
        raise
    if not isinstance(found, ExportFormat):
        raise UsageError(
            f"--to {name} is an object of {path_of(type(found))}; use module:FORMAT, the path of an ExportFormat"
        )
    return found


def export(
    run: Run,
    out: Path,
    to: str,
    *,
    iterations: Iterations = None,
    steps: Sequence[int] = (),
    by: By | None = None,
    on_progress: Progress = unseen,
) -> Export:
    """Export a run to another format, with the options of `metaloom export`."""
    form = format_of(to)
    options = (("iterations", iterations), ("steps", steps or None), ("by", by))
    given = {name: value for name, value in options if value is not None}
    for name in given:
        if not form.takes(name):
            option = "step" if name == "steps" else name
            raise UsageError(f"--to {to} does not support --{option}; remove it")
    if not len(run.select(iterations)):
        raise UsageError(f"{run.path} has no complete iteration to export")
    stored = dict.fromkeys(ref.step for ref in run.refs() if ref.stage == run.stages.named("rollouts"))
    if wrong := [step for step in steps if step not in stored]:
        raise UsageError(f"the run has no inner step {wrong[0]}; --step must be one of {', '.join(map(str, stored))}")
    if form.holds_episodes and next(Export(out).available(run, iterations, steps or None), None) is None:
        raise UsageError(
            f"{run.path} has no iteration with stored episodes. "
            f"`metaloom replay {argument(run.path)} --materialise` restores thinned ones"
        )
    return form.export(run, out, on_progress, **given)

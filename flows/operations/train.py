"""`train`, `resume` and `iterate`: train a run."""

from collections.abc import Callable, Generator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from metaloom import storage
from metaloom.flows.arguments import checked
from metaloom.flows.errors import UsageError
from metaloom.flows.loggers import check_loggers
from metaloom.flows.operations import late
from metaloom.flows.operations.options import (
    FilmEvery,
    Log,
    MetricsPort,
    Overrides,
    PythonOnly,
    RunArgument,
    Trust,
    agree,
    changes,
    complete_recipes,
    refuse_with,
    refuse_without,
)
from metaloom.flows.rollouts.backend import IN_PROCESS, Backend
from metaloom.flows.runs import folder_of, new_run_name, run_folder
from metaloom.pipeline.device import DeviceName
from metaloom.pipeline.lazy import installed
from metaloom.storage import check_new_run, open_run

if TYPE_CHECKING:
    from metaloom.flows.graph.loop import Training, TrainResult
    from metaloom.flows.opened import FinishedIteration, Run
    from metaloom.pipeline.config.run import RunConfig

_ADDED = [point.name for point in installed("metaloom.recipes")]
Recipe = Annotated[
    str | Annotated["RunConfig", PythonOnly],
    Parameter(
        completer=complete_recipes,
        help="A recipe (`metaloom recipes` lists them), or a YAML, JSON or TOML settings file."
        + (f" Installed packages add {', '.join(_ADDED)}." if _ADDED else ""),
    ),
]
Shown = Annotated[bool | Callable[..., Any], PythonOnly]
"""True to print progress. A command passes a function that shows the training, whose result is then returned."""


@checked
def train(
    recipe: Recipe,
    run: Annotated[str | Path | None, Parameter(name="--run")] = None,
    *,
    iterations: int | None = None,
    seed: int | None = None,
    overrides: Overrides = (),
    device: DeviceName | None = None,
    strict: bool = False,
    backend: Backend = IN_PROCESS,
    log: Log = (),
    film_every: FilmEvery = None,
    metrics_port: MetricsPort = None,
    progress: Shown = True,
    **settings: Any,
) -> "Run":
    """Train a new run.

    Example: `metaloom train promp-point-corner --run first --iterations 20`

    Args:
        recipe: A recipe, a settings file, or a RunConfig.
        run: Name of the run under the runs folder, or a path; by default, derived from the recipe and the time.
        iterations: Number of iterations; short for `--set iterations=20`.
        seed: Seed of all random draws; short for `--set seed=2`.
        overrides: Settings to change, as KEY=VALUE.
        device: Device on which torch computes updates, recorded with the run; short for `--set device=cuda`.
        strict: Stop with exit code 1 after an iteration whose witness episode cannot be reproduced.
        backend: Rollout backend.
        log: Additional loggers: `tensorboard`, `wandb` or `mlflow`, or module:function.
        film_every: With `log`, number of iterations between videos; the last iteration always has one.
        metrics_port: Port at which Prometheus can scrape the training.
        progress: Print each iteration.
        **settings: Settings to change, keyed by RunConfig field; for a section, a mapping of its fields.

    Raises:
        ConfigError, EnvError: A setting is invalid.
        storage.RunExists: The run already exists.
    """
    check_log(log, film_every)
    config = new_settings(recipe, changes(overrides, settings), iterations=iterations, seed=seed, device=device)
    require_witness(strict, config.env.witness)
    folder = new_folder(recipe, run, config)
    start = partial(late.train_run, config, folder, backend=backend)
    return _watched(folder, start, progress, log, film_every, metrics_port, strict)


@checked
def resume(
    run: RunArgument,
    *,
    iterations: int | None = None,
    take_over: bool = False,
    repair: bool = False,
    strict: bool = False,
    overrides: Annotated[
        Sequence[str], Parameter(name="--set", help="Change what is kept: `--set retention.keep_last=10`. Repeatable.")
    ] = (),
    trust: Trust = False,
    backend: Backend = IN_PROCESS,
    log: Log = (),
    film_every: FilmEvery = None,
    metrics_port: MetricsPort = None,
    progress: Shown = True,
) -> "Run":
    """Resume a run after any interruption.

    It continues with the first missing stage.

    Example: `metaloom resume first --iterations 40`

    Args:
        run: Run to resume.
        iterations: Total number of iterations to reach; by default, as configured.
        take_over: Take the lock of a writer that can no longer release it, for example because its host died.
        repair: Repair or recompute what `metaloom verify` reports as damaged, then verify the run; exit code 1 if it is
            not intact.
        strict: Stop with exit code 1 after an iteration whose witness episode cannot be reproduced.
        overrides: Retention settings to change, as KEY=VALUE.
        trust: Allow importing the modules that the run's settings name, now and later.
        backend: Rollout backend.
        log: Additional loggers: `tensorboard`, `wandb` or `mlflow`, or module:function.
        film_every: With `log`, number of iterations between videos; the last iteration always has one.
        metrics_port: Port at which Prometheus can scrape the training.
        progress: Print each iteration.
    """
    folder = folder_of(run)
    check_log(log, film_every)
    agree(folder, trust)
    require_witness(strict, not strict or open_run(folder).config["env"].get("witness", False))
    start = partial(
        late.resume_run,
        folder,
        iterations=iterations,
        take_over=take_over,
        repair=repair,
        retention=changes(overrides),
        backend=backend,
    )
    return _watched(folder, start, progress, log, film_every, metrics_port, strict)


@checked
def iterate(
    recipe: Recipe | storage.Run,
    run: str | Path | None = None,
    *,
    iterations: int | None = None,
    seed: int | None = None,
    overrides: Sequence[str] = (),
    device: DeviceName | None = None,
    backend: Backend = IN_PROCESS,
    log: Sequence[str] = (),
    **settings: Any,
) -> "Generator[FinishedIteration]":
    """Train a run in a loop over its iterations, with the same results as `train`.

    Leaving the loop, with `break` or an exception, stops the run after that iteration. `resume` or another loop over
    the opened run continues it.

    Args:
        recipe: A recipe, a settings file, or a RunConfig; or an opened run to continue.
        run: Name of the new run under the runs folder, or a path; by default, derived from the recipe and the time.
        iterations: Total number of iterations.
        seed: Seed of all random draws.
        overrides: Settings to change, as KEY=VALUE.
        device: Device on which torch computes updates, recorded with the run.
        backend: Rollout backend.
        log: Additional loggers; see `train`.
        **settings: Settings to change; see `train`.

    Returns:
        Generator of the stored iterations. Its `close()` also stops the run.

    Raises:
        ConfigError, EnvError: A setting is invalid.
        storage.RunExists: The run already exists.
    """
    check_log(log, None)
    if isinstance(recipe, storage.Run):
        new = {"run": run, "seed": seed, "device": device, "overrides": overrides or None, **settings}
        refuse_with("an opened run", **new)
        folder = recipe.path.absolute()  # the loop may change the working directory
        start = partial(late.resuming, folder, iterations=iterations, backend=backend)
    else:
        config = new_settings(recipe, changes(overrides, settings), iterations=iterations, seed=seed, device=device)
        folder = new_folder(recipe, run, config).absolute()
        check_new_run(folder)
        start = partial(late.training, config, folder, backend=backend)
    return _iterations(folder, start, log)


def _iterations(folder: Path, start: "Callable[..., Training]", log: Sequence[str]) -> "Generator[FinishedIteration]":
    """Yield each iteration of a run once it is trained; closing the generator stops the run."""
    run, left = None, False
    with late.logging_to(log, folder, late.Observer(should_stop=lambda: left, reads=True)) as observer:
        training = start(observer=observer)
        try:
            for report in training:
                run = late.Run.open(folder) if run is None else run
                yield late.FinishedIteration(run, report.iteration, report)
        except GeneratorExit:
            left = True
            next(training, None)  # stops before the next stage


def new_settings(recipe: "str | RunConfig", overrides: Sequence[str], **short: Any) -> "RunConfig":
    """Return the settings of a new run; `short` contains settings with separate options, None for those not given."""
    # Reject settings before importing numerics, which takes seconds.
    for name in {assignment.partition("=")[0] for assignment in overrides}:
        refuse_with(f"--set {name}", **{name: short.get(name)})
    given = [*overrides, *late.assignments({name: value for name, value in short.items() if value is not None})]
    if isinstance(recipe, str):
        return late.new_config(recipe, given)
    before = recipe.model_dump(mode="json", exclude={"env": recipe.env.left_open})
    return late.build_config(late.override(before, given))


def new_folder(recipe: "str | RunConfig", run: str | Path | None, config: "RunConfig") -> Path:
    """Return the folder of a new run, by default named after its recipe and the time."""
    stem = Path(recipe).stem if isinstance(recipe, str) else config.algorithm.name
    return run_folder(new_run_name(stem) if run is None else run)


def check_log(log: Sequence[str], film_every: int | None) -> None:
    """Raise UsageError if a logger's package is not installed, or if logging options contradict one another."""
    if not log:
        refuse_without("--log", film_every=film_every)
    check_loggers(log, film_every)


def require_witness(strict: bool, witness: bool) -> None:
    """Raise UsageError if `strict` is True, but no witness episode would be replayed."""
    if strict and not witness:
        raise UsageError(
            "with --strict, no episode would be replayed; train without --dry-run and with env.witness=true, which is "
            "the default for environments that are not built in"
        )


def _watched(
    folder: Path,
    start: "Callable[..., TrainResult]",
    progress: Shown,
    log: Sequence[str],
    film_every: int | None,
    metrics_port: int | None,
    strict: bool,
) -> "Run":
    """Train a run with the requested logging, metrics endpoint and strictness, and return the opened run."""

    def watched(observer: late.Observer) -> "TrainResult":
        served = nullcontext(observer) if metrics_port is None else late.metrics_at(metrics_port, folder.name, observer)
        with served as measured, late.logging_to(log, folder, measured, film_every=film_every) as watching:
            return start(observer=late.strictly(watching) if strict else watching)

    if callable(progress):
        return progress(folder, watched)
    with late.shown_progress() if progress else nullcontext(late.Observer()) as observer:
        watched(observer)
    return late.Run.open(folder)

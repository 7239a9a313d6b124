"""`metaloom train` and `metaloom resume`."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from metaloom.flows.cli.options import (
    ANYWHERE,
    NOWHERE,
    AsJson,
    BackendOptions,
    Flag,
    LogOptions,
    MetricsPort,
    Overrides,
    RunArgument,
    Trust,
    agree,
    complete_recipes,
    refuse_with,
    refuse_without,
)
from metaloom.flows.cli.output import answer, console, say, unless_closed
from metaloom.flows.errors import EXIT_INTERRUPTED, USAGE, UsageError
from metaloom.flows.views.status import STATUS
from metaloom.pipeline.device import DeviceName
from metaloom.pipeline.shown import printable

if TYPE_CHECKING:
    from metaloom.flows.commands.train import Observer, TrainResult
    from metaloom.flows.rollouts.workers import Backend
    from metaloom.pipeline.config.run import RunConfig


_ADDED = [point.name for point in entry_points(group="metaloom.recipes")]
Recipe = Annotated[
    str,
    Parameter(
        completer=complete_recipes,
        help="A recipe (`metaloom recipes` lists them), or a YAML, JSON or TOML file of settings."
        + (f" Installed packages add {', '.join(_ADDED)}." if _ADDED else ""),
    ),
]


def train(
    recipe: Recipe,
    *,
    run: str | None = None,
    iterations: int | None = None,
    seed: int | None = None,
    overrides: Overrides = (),
    device: DeviceName | None = None,
    dry_run: Flag = False,
    probe: Flag = False,
    strict: Flag = False,
    where: BackendOptions = ANYWHERE,
    also: LogOptions = NOWHERE,
    metrics_port: MetricsPort = None,
    as_json: AsJson = False,
) -> int:
    """Train a new run.

    Example: `metaloom train promp-point-corner --run first --iterations 20`

    Args:
        run: Name of the run under the runs folder, or a path; made from recipe and time by default.
        iterations: Number of iterations; short for `--set iterations=20`.
        seed: Seed of everything random; short for `--set seed=2`.
        device: Device on which torch computes updates, recorded with the run; short for `--set device=cuda`.
        dry_run: Create nothing: print the environment steps that the run would take, and what this machine has.
        probe: With --dry-run, measure memory, disk and time too: train up to ten iterations in a temporary folder.
        strict: Stop with exit code 1 after an iteration whose witness episode cannot be reproduced.
    """
    if not dry_run:
        refuse_without("--dry-run", probe=probe)
    also.check()
    from metaloom.flows.recipes import new_config

    # Settings are refused before numerics are imported, which takes seconds.
    short = {"iterations": iterations, "seed": seed, "device": device}
    for name in {assignment.partition("=")[0] for assignment in overrides}:
        refuse_with(f"--set {name}", **{name: short.get(name)})
    given = (f"{name}={value}" for name, value in short.items() if value is not None)
    config = new_config(recipe, (*overrides, *given))
    _require_witness(strict, config.env.witness and not dry_run)
    backend = where.backend()
    from metaloom.flows.runs import new_run_name, run_folder

    folder = run_folder(run if run is not None else new_run_name(Path(recipe).stem))
    if dry_run:
        return _dry_run(config, folder, backend, probe=probe, as_json=as_json)
    from metaloom.flows.commands.train import train as train_run

    def start(observer: "Observer") -> "TrainResult":
        return train_run(config, folder, backend=backend, observer=observer)

    return _train(start, folder, also, metrics_port, as_json, strict=strict)


def resume(
    run: RunArgument,
    *,
    iterations: int | None = None,
    take_over: Flag = False,
    repair: Flag = False,
    strict: Flag = False,
    retention: Annotated[
        tuple[str, ...],
        Parameter(
            name="--set",
            negative=(),
            show_default=False,
            help="Change what is kept: `--set retention.keep_last=10`. Repeatable.",
        ),
    ] = (),
    trust: Trust = False,
    where: BackendOptions = ANYWHERE,
    also: LogOptions = NOWHERE,
    metrics_port: MetricsPort = None,
    as_json: AsJson = False,
) -> int:
    """Continue a run, whatever interrupted it.

    It continues with the first missing stage.

    Example: `metaloom resume first --iterations 40`

    Args:
        iterations: Total number of iterations to reach; as configured by default.
        take_over: Seize the lock of a writer that can no longer release it, such as one on a host that died.
        repair: Mend or recompute what `metaloom verify` finds damaged, then verify the run: exit code 1 if it is not
            intact.
        strict: Stop with exit code 1 after an iteration whose witness episode cannot be reproduced.
    """
    from metaloom.flows.runs import run_folder

    folder, backend = run_folder(run), where.backend()
    also.check()
    agree(folder, trust)
    from metaloom.flows.commands.train import resume as resume_run
    from metaloom.storage import open_run

    _require_witness(strict, not strict or open_run(folder).config["env"].get("witness", False))

    def start(observer: "Observer") -> "TrainResult":
        return resume_run(
            folder,
            iterations=iterations,
            take_over=take_over,
            repair=repair,
            retention=retention,
            backend=backend,
            observer=observer,
        )

    return _train(start, folder, also, metrics_port, as_json, strict=strict)


def _require_witness(strict: bool, witness: bool) -> None:
    if strict and not witness:
        raise UsageError(
            "found --strict, but no episode would be played again; required a run with env.witness=true, which is the "
            "default of environments that are not built in, and no --dry-run"
        )


def _dry_run(config: "RunConfig", folder: Path, backend: "Backend", *, probe: bool, as_json: bool) -> int:
    from metaloom.flows.commands.dry_run import dry_run

    found = dry_run(config, folder, backend, probe=probe)
    answer(as_json, found.document, found.table)
    if found.refusal is None:
        return 0
    print(f"metaloom: {printable(found.refusal)}", file=sys.stderr)
    return USAGE


def _train(
    start: "Callable[[Observer], TrainResult]",
    folder: Path,
    also: LogOptions,
    metrics_port: int | None,
    as_json: bool,
    *,
    strict: bool,
) -> int:
    from metaloom.flows.formatting import plural
    from metaloom.flows.interrupt import stop_on_interrupt
    from metaloom.flows.observer import strict as strictly
    from metaloom.flows.results.verification import what_helps
    from metaloom.flows.views.progress import progress
    from metaloom.storage import argument, location

    go_on = f"go on with: metaloom resume {argument(folder)}"

    def again() -> str:
        return go_on if (folder / "run.json").exists() else "nothing was stored yet"

    STATUS.end()
    with (
        stop_on_interrupt(again) as stop,
        progress(mode="json" if as_json else "auto", stop=stop, out=sys.stdout) as observer,
    ):
        shown = replace(observer, iteration_done=unless_closed(observer.iteration_done))
        with _measured(metrics_port, folder, shown) as measured, also.to(folder, measured) as watching:
            result = start(strictly(watching) if strict else watching)
    tell = unless_closed(say)
    if result.stopped:
        tell(as_json, f"stopped after {plural(result.iterations_done, 'iteration')}; {go_on}")
        return EXIT_INTERRUPTED
    if result.damage is not None:
        lines = [*(f"repaired  {line}" for line in result.repaired), *(f"damaged   {line}" for line in result.damage)]
        ending = [*what_helps(folder, result.damage)] if result.damage else ["verified  every file is intact"]
        tell(as_json, "\n".join([*lines, *ending]))
    if result.damage:
        return 1
    if result.enough:
        done = plural(result.iterations_done, "iteration")
        tell(as_json, f"\nended after {done}, as `stop` asks: {'; '.join(result.enough)}")
    elif not result.computed and result.damage is None:
        done, name = plural(result.iterations_done, "iteration"), argument(folder)
        tell(as_json, f"nothing was missing: the run has its {done}; for more: metaloom resume {name} --iterations N")
    if stop():  # there may be no time left for charts
        tell(as_json, f"complete; for its report: metaloom report {argument(folder)}")
        return 0
    with nullcontext() if as_json else STATUS.shown("writing the report", console()):
        steps = _next_steps(result.path)
    tell(as_json, steps)
    if "tensorboard" in also.log:
        from metaloom.flows.loggers.live import log_folder

        tell(as_json, f"  tensorboard --logdir {location(log_folder(result.path) / 'tensorboard')}")
    return 0


def _measured(port: int | None, folder: Path, observer: "Observer") -> "AbstractContextManager[Observer]":
    if port is None:
        return nullcontext(observer)
    from metaloom.flows.metrics_endpoint import metrics_at

    return metrics_at(port, folder.name, observer)


def _next_steps(folder: Path) -> str:
    from metaloom.flows.cli.report import write
    from metaloom.flows.formatting import program
    from metaloom.flows.runs import report_folder, run_folder
    from metaloom.storage import argument, location, open_run

    files = write(open_run(folder), report_folder(folder))
    place = location(folder)
    name = folder.name if run_folder(folder.name) == folder else argument(folder)
    question = f"import metaloom; print(metaloom.open_run({place!r}).episodes().to_pandas())"
    return "\n".join(
        [
            f"\nrun             {place}",
            f"learning curve  {files.png}",
            f"report page     {files.html}",
            "\nlook further:",
            f"  {program('metaloom')} view {name}",
            f"  {program('metaloom')} show {name}",
            f"  {program('metaloom')} replay {name}@0",
            f"  {program('python')} -c {question!r}",
        ]
    )

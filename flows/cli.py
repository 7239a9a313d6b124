"""The command line. Exit codes: 0 done, 1 found a difference or a failure, 2 wrong usage, 130 stopped by Ctrl-C.

Commands import what they need when they run: listing runs should not wait for torch.
"""

import faulthandler
import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

from cyclopts import App, CycloptsError, Parameter
from rich.console import Console

from metaloom import storage
from metaloom.flows.errors import USAGE, UsageError, exit_code
from metaloom.flows.runs import RunAt, new_run_name, parse_span, report_folder, require_iteration, run_folder, runs_root

if TYPE_CHECKING:
    from metaloom.flows.rollouts.workers import Backend
    from metaloom.flows.views.report import ReportFiles

EXIT_OUTPUT_CLOSED = 128 + 13  # as of a process that SIGPIPE ended


class OutputClosed(Exception):
    """Whoever read standard output has gone away, as `head` does."""


class _Console(Console):
    def on_broken_pipe(self) -> NoReturn:
        raise OutputClosed


app = App(
    console=_Console(),
    name="metaloom",
    help="Meta-reinforcement learning as a dataflow: every batch kept, every stage replayable bit for bit.",
    help_format="markdown",
    version_flags=["--version"],
)

Overrides = Annotated[
    tuple[str, ...],
    Parameter(name="--set", negative=(), help="Change a setting: `--set algorithm.inner_lr=0.05`. Repeatable."),
]
Workers = Annotated[
    int | None,
    Parameter(
        help="Dask worker processes on this machine, two if left out, none for a run of one task; 0 samples in this "
        "process."
    ),
]
Threads = Annotated[int, Parameter(help="Physics threads when sampling in this process (`--workers 0`).")]
Scheduler = Annotated[str | None, Parameter(help="Address of a running Dask scheduler, `tcp://host:port`.")]
StepTimeout = Annotated[
    float | None,
    Parameter(help="Seconds a worker waits for one call of an environment before it gives up; 60 if left out."),
]
Retries = Annotated[
    int | None,
    Parameter(help="How often work is done again whose worker process died; 3 if left out."),
]
AsJson = Annotated[bool, Parameter(name="--json", negative=(), help="Print JSON instead of text.")]
RunArgument = Annotated[
    str, Parameter(help="A name under the runs folder, a path, or a URL such as s3://bucket/runs/first.")
]


def main() -> None:
    """Entry point of the `metaloom` command."""
    # An environment that crashes this process (`--workers 0`) leaves at least a traceback.
    faulthandler.enable()
    sys.exit(run(sys.argv[1:]))


def run(tokens: Sequence[str]) -> int:
    """Run one command and return its exit code."""
    try:
        return app(tokens, exit_on_error=False, result_action="return_value") or 0
    except CycloptsError:
        return USAGE  # cyclopts has printed what is wrong
    except OutputClosed:
        _discard_output()
        return EXIT_OUTPUT_CLOSED
    except Exception as error:
        code = exit_code(error)
        if code is None:
            raise
        print(f"metaloom: {error}", file=sys.stderr)
        return code


@app.command
def train(
    recipe: str,
    *,
    run: str | None = None,
    overrides: Overrides = (),
    workers: Workers = None,
    threads: Threads = 1,
    scheduler: Scheduler = None,
    step_timeout: StepTimeout = None,
    retries: Retries = None,
    as_json: AsJson = False,
) -> int:
    """Train a new run.

    Example: `metaloom train promp-point-corner --run first --set iterations=20`

    Args:
        recipe: A recipe (`metaloom recipes` lists them), or a YAML or JSON file of settings.
        run: Name of the run under the runs folder, or a path; made from recipe and time when left out.
    """
    from metaloom.flows.commands.train import train as train_run
    from metaloom.flows.recipes import load_settings
    from metaloom.flows.rollouts.workers import Backend
    from metaloom.pipeline.config.input import override
    from metaloom.pipeline.config.run import build_config

    config = build_config(override(load_settings(recipe), overrides))
    backend = Backend(workers, threads, scheduler, step_timeout, retries)
    folder = run_folder(run if run is not None else new_run_name(Path(recipe).stem))
    return _train(lambda observer: train_run(config, folder, backend=backend, observer=observer), folder, as_json)


@app.command
def resume(
    run: RunArgument,
    *,
    iterations: int | None = None,
    take_over: Annotated[bool, Parameter(negative=())] = False,
    repair: Annotated[bool, Parameter(negative=())] = False,
    retention: Annotated[
        tuple[str, ...],
        Parameter(name="--set", negative=(), help="Change what is kept: `--set retention.keep_last=10`. Repeatable."),
    ] = (),
    workers: Workers = None,
    threads: Threads = 1,
    scheduler: Scheduler = None,
    step_timeout: StepTimeout = None,
    retries: Retries = None,
    as_json: AsJson = False,
) -> int:
    """Go on with a run from its first missing stage, whatever interrupted it.

    Example: `metaloom resume first --iterations 40`

    Args:
        iterations: How many iterations the run shall have; as configured when left out.
        take_over: Seize the lock of a writer that can no longer release it, such as one on a host that died.
        repair: Drop the outputs that `metaloom verify` finds damaged, and compute them again.
    """
    from metaloom.flows.commands.train import resume as resume_run
    from metaloom.flows.rollouts.workers import Backend

    folder, backend = run_folder(run), Backend(workers, threads, scheduler, step_timeout, retries)
    return _train(
        lambda observer: resume_run(
            folder,
            iterations=iterations,
            take_over=take_over,
            repair=repair,
            retention=retention,
            backend=backend,
            observer=observer,
        ),
        folder,
        as_json,
    )


@app.command
def replay(
    run: RunArgument,
    *,
    stage: str | None = None,
    step: int | None = None,
    until_diff: Annotated[bool, Parameter(negative=())] = False,
    pdb: Annotated[bool, Parameter(negative=())] = False,
    materialise: Annotated[bool, Parameter(negative=())] = False,
    quarantine: Annotated[bool, Parameter(negative=())] = False,
    workers: Annotated[int | None, Parameter(help="Dask worker processes on this machine; none if left out.")] = None,
    threads: Threads = 1,
    scheduler: Scheduler = None,
    step_timeout: StepTimeout = None,
    retries: Retries = None,
    as_json: AsJson = False,
) -> int:
    """Run stored stages again from their stored inputs and compare every array, bit for bit.

    Exit code 0 when all are identical, 1 when one differs.

    Example: `metaloom replay first@3 --stage adapt`

    Args:
        run: RUN@ITERATION for one iteration, RUN for all of them.
        stage: Only this stage: sample_tasks, collect_rollouts, process_samples, adapt, meta_optimize or evaluate; off
            policy fill_memory, sample_tasks, collect_rollouts, adapt, sample_transitions, update or evaluate.
        step: Only this inner step of the stage.
        until_diff: Stop after the first stage that differs.
        pdb: Run one stage, stored or not, in this process, and enter Python's debugger where it fails.
        materialise: Compute what was thinned again and store it, if it has its old digest.
        quarantine: Run the episode again, in this process, in which an environment failed and which was kept.
    """
    elsewhere = {"workers": workers, "scheduler": scheduler, "step_timeout": step_timeout, "retries": retries}
    if quarantine:
        _refuse_with("--quarantine", until_diff=until_diff, materialise=materialise, json=as_json, **elsewhere)
        return _reproduce(run, stage, step, debug=pdb)
    if pdb:
        _refuse_with("--pdb", until_diff=until_diff, materialise=materialise, json=as_json, **elsewhere)
        return _debug(run, stage, step, threads)
    from metaloom.flows.commands.replay import replay as replay_run
    from metaloom.flows.rollouts.workers import Backend
    from metaloom.flows.views.tables import difference_table, replay_line

    at = RunAt.parse(run)
    none_named = workers is None and scheduler is None
    backend = Backend(0 if none_named else workers, threads, scheduler, step_timeout, retries)
    if materialise:
        return _materialise(at, backend, whole=stage is None and step is None and not until_diff, as_json=as_json)
    outcomes = []
    for outcome in replay_run(
        at.path,
        at.iteration,
        stage=stage,
        step=step,
        until_diff=until_diff,
        backend=backend,
    ):
        outcomes.append(outcome)
        if not as_json:
            console().print(replay_line(outcome))
    different = [outcome for outcome in outcomes if not outcome.identical]
    if as_json:
        _print_json([outcome.as_dict() for outcome in outcomes])
    elif different:
        console().print(difference_table([difference for outcome in different for difference in outcome.differences]))
    else:
        console().print(f"{len(outcomes)} stages replayed: all identical")
    return 1 if different else 0


@app.command
def optimize(
    run: Annotated[str, Parameter(help="RUN@ITERATION.")],
    *,
    overrides: Overrides = (),
    grid: Annotated[
        tuple[str, ...],
        Parameter(
            name="--grid", negative=(), help="Try several values: `--grid algorithm.clip_eps=0.1,0.2`. Repeatable."
        ),
    ] = (),
    stage: str | None = None,
    step: int = 0,
    as_json: AsJson = False,
) -> int:
    """Compute a stage again on stored batches under other settings, without sampling, and compare the outcomes.

    Example: `metaloom optimize first@3 --set algorithm.clip_eps=0.1`

    Args:
        stage: Which stage: any that does not sample, such as adapt; when left out the one that ends the iteration,
            which is meta_optimize, or update in a run that learns off policy.
        step: Its inner step.
    """
    from metaloom.flows.commands.optimize import sweep
    from metaloom.flows.views.comparison_tables import counterfactual_table, grid_table, parse_grid

    at = RunAt.parse(run)
    if at.iteration is None:
        raise UsageError(f"{run}: required RUN@ITERATION, such as {run}@0")
    values = parse_grid(grid)
    results = list(sweep(at.path, at.iteration, values, overrides, stage=stage, step=step))
    if as_json:
        _print_json([result.as_dict() for result in results])
    else:
        console().print(grid_table(results) if values else counterfactual_table(results[0]))
    return 0


@app.command
def diff(run_a: RunArgument, run_b: RunArgument, *, as_json: AsJson = False) -> int:
    """Compare two runs: settings, code and packages, and the first output that differs, by how much.

    Exit code 0 when settings and outputs are equal, 1 when they differ.

    Example: `metaloom diff first second`
    """
    from metaloom.flows.commands.diff import diff_runs
    from metaloom.flows.views.comparison_tables import diff_view

    outcome = diff_runs(run_folder(run_a), run_folder(run_b))
    if as_json:
        _print_json(outcome.as_dict())
    else:
        console().print(diff_view(outcome))
    return 0 if outcome.equal else 1


@app.command
def evaluate(
    run: RunArgument,
    *,
    tasks: str | None = None,
    num_tasks: int | None = None,
    evenly_by: str | None = None,
    adaptation_steps: int | None = None,
    episodes: int | None = None,
    test_episodes: int | None = None,
    deterministic: bool | None = None,
    seed: int | None = None,
    plot: Path | None = None,
    workers: Workers = None,
    threads: Threads = 1,
    scheduler: Scheduler = None,
    step_timeout: StepTimeout = None,
    retries: Retries = None,
    as_json: AsJson = False,
) -> int:
    """Adapt a stored learner to tasks and report its return on fresh test episodes after every adaptation step.

    What is left out is as in the run's `evaluation` settings, and else as in training.

    Example: `metaloom evaluate first@10 --num-tasks 20 --adaptation-steps 3 --test-episodes 10 --plot curve.png`

    Args:
        run: RUN for the latest learner, RUN@N for the learner after N updates.
        tasks: `held-out`: tasks that training never drew; `train`: from its fixed set, or those of the last
            iteration; or a JSON, YAML or Parquet file of tasks.
        num_tasks: Tasks to draw; when left out each test task or task of the file once, else as many as in training.
        evenly_by: Draw evenly from the classes of a fixed set: the task field that tells them apart.
        adaptation_steps: Largest number of inner steps; the return is reported for each from 0 on.
        episodes: Episodes per task that every adaptation step learns from.
        test_episodes: Episodes per task that judge every number of steps; no step learns from them.
        deterministic: Take the most likely action in test episodes.
        seed: Which tasks and episodes are drawn.
        plot: Draw return against adaptation episodes into this .png or .svg file.
    """
    from metaloom.flows.commands.evaluate import evaluate as evaluate_run
    from metaloom.flows.rollouts.workers import Backend
    from metaloom.flows.views.tables import evaluation_info, evaluation_table

    at = RunAt.parse(run)
    if plot is not None:
        from metaloom.flows.views.evaluation_plots import check_plot_file

        check_plot_file(plot)
    outcome = evaluate_run(
        at.path,
        at.iteration,
        tasks=tasks,
        num_tasks=num_tasks,
        evenly_by=evenly_by,
        adaptation_steps=adaptation_steps,
        episodes=episodes,
        test_episodes=test_episodes,
        deterministic=deterministic,
        seed=seed,
        backend=Backend(workers, threads, scheduler, step_timeout, retries),
    )
    if plot is not None:
        from metaloom.flows.views.evaluation_plots import per_shot_curve, write_plot

        write_plot(plot, per_shot_curve(f"{at.path.name} after {outcome.updates} updates", outcome.evaluation))
    if as_json:
        _print_json(evaluation_info(outcome))
    else:
        console().print(evaluation_table(outcome))
    return 0


@app.command
def fork(parent: RunArgument, *, run: str, overrides: Overrides = ()) -> int:
    """Make a run that begins with the iterations of another one and goes on under other settings.

    `metaloom resume` then continues it. Files are shared with the parent, which can be thinned or deleted.

    Example: `metaloom fork first@10 --run second --set algorithm.clip_eps=0.1`

    Args:
        parent: RUN@N to begin with the first N iterations, RUN for all of them.
        run: Name of the new run under the runs folder, or a path.
    """
    from metaloom.flows.commands.fork import fork as fork_run
    from metaloom.flows.views.tables import fork_view

    at = RunAt.parse(parent)
    console().print(fork_view(fork_run(at.path, at.iteration, run_folder(run), overrides), at.path))
    return 0


@app.command
def thin(
    run: RunArgument,
    *,
    keep_every: int | None = None,
    keep_last: int | None = None,
    dry_run: Annotated[bool, Parameter(negative=())] = False,
    as_json: AsJson = False,
) -> int:
    """Remove the episodes, samples and adapted parameters of iterations; everything else stays.

    Of a run that learns off policy the episodes stay too, since they are its replay buffer: minibatches and adapted
    parameters go. `metaloom replay RUN@ITERATION --materialise` computes them again, bit for bit.

    Example: `metaloom thin first --keep-every 10 --keep-last 5 --dry-run`

    Args:
        keep_every: Keep iterations 0, N, 2N, ... whole.
        keep_last: Keep the N newest iterations whole.
        dry_run: Only tell what would go.
    """
    from metaloom.flows.commands.thin import thin as thin_run
    from metaloom.flows.views.tables import thinned_line

    folder = run_folder(run)
    retention = storage.Retention(keep_last=keep_last, keep_every=keep_every)
    thinned = thin_run(folder, retention, dry_run=dry_run)
    if as_json:
        _print_json({**asdict(thinned), "dry_run": dry_run})
    else:
        console().print(thinned_line(thinned, dry_run=dry_run))
    return 0


@app.command(name="ls")
def list_runs(*, as_json: AsJson = False) -> int:
    """List the runs in the runs folder.

    Example: `METALOOM_RUNS=/data/runs metaloom ls`
    """
    from metaloom.flows.views.tables import list_run_rows, runs_table

    rows = list_run_rows(runs_root())
    if as_json:
        _print_json(rows)
    elif rows:
        console().print(runs_table(rows))
    else:
        console().print(f"no runs in {storage.location(runs_root())}; `metaloom train promp-point-corner` makes one")
    return 0


@app.command
def show(
    run: RunArgument,
    *,
    stage: Literal["sample_transitions"] | None = None,
    update: int | None = None,
    rows: str | None = None,
    context: Annotated[bool, Parameter(negative=())] = False,
    as_json: AsJson = False,
) -> int:
    """Show what a run is and how far it got, the stages of one iteration, or what a gradient step learned from.

    Example: `metaloom show first@3`

    Args:
        stage: Show the transitions behind the row numbers that this stage drew, with where each is from.
        update: Those of this gradient step of the iteration; of the first when left out.
        rows: N or FROM:TO, which transitions of the minibatch, as Python slices count; 0:20 when left out, `:` for all.
        context: Those that tasks were inferred from, instead of those that were learned from.
    """
    from metaloom.flows.views.tables import iteration_info, iteration_view, run_info, run_view

    at = RunAt.parse(run)
    opened = storage.open_run(at.path)
    if at.iteration is not None:
        require_iteration(opened, at.iteration)
    if stage is not None:
        return _show_minibatch(opened, at.iteration, update or 0, rows or "0:20", context=context, as_json=as_json)
    _refuse_without("--stage sample_transitions", update=update, rows=rows, context=context)
    if as_json:
        _print_json(run_info(opened) if at.iteration is None else iteration_info(opened, at.iteration))
    else:
        console().print(run_view(opened) if at.iteration is None else iteration_view(opened, at.iteration))
    return 0


@app.command
def verify(run: RunArgument, *, as_json: AsJson = False) -> int:
    """Check every stored file of a run against its records.

    Exit code 0 when all are whole, 1 when one is damaged, missing or foreign.

    Example: `metaloom verify first`
    """
    from metaloom.flows.views.tables import damage_info, damage_table

    folder = run_folder(run)
    damages = storage.verify_run(folder)
    if as_json:
        _print_json([damage_info(damage) for damage in damages])
    elif damages:
        console().print(damage_table(damages))
    else:
        console().print(f"{storage.location(folder)}: every file is whole")
    return 1 if damages else 0


@app.command
def report(run: RunArgument, *, out: Path | None = None) -> int:
    """Write the learning curve as PNG and a self-contained HTML page.

    Example: `metaloom report first`

    Args:
        out: Folder for the files; reports/NAME in the runs folder when left out.
    """
    opened = storage.open_run(run_folder(run))
    files = _write_report(opened, out if out is not None else report_folder(opened.path))
    console().print(f"learning curve  {files.png}\nreport page     {files.html}")
    return 0


@app.command
def export(
    run: RunArgument,
    *,
    to: Literal["parquet", "minari", "histories", "tensorboard"],
    out: Path,
    iterations: str | None = None,
    step: Annotated[tuple[int, ...], Parameter(negative=())] = (),
    by: Literal["task", "position"] | None = None,
    as_json: AsJson = False,
) -> int:
    """Write a run for other tools: Parquet, a Minari dataset, learning histories or TensorBoard events.

    Example: `metaloom export first --to parquet --out first-parquet`

    Args:
        to: The format; minari and tensorboard need the extra of that name.
        out: A new or empty folder.
        iterations: N or FROM:TO, as Python slices count; all complete ones when left out.
        step: Only episodes of this inner step; repeatable.
        by: What a learning history belongs to: its task, or its place in the meta-batch.
    """
    from metaloom.flows.exports.export import export as export_run

    chosen = None if iterations is None else parse_span("--iterations", iterations)
    result = export_run(storage.open_run(run_folder(run)), out, to, iterations=chosen, steps=step, by=by)
    if as_json:
        skipped = [{"iteration": i, "reason": reason} for i, reason in result.skipped]
        done = {"path": str(result.path), "iterations": result.iterations, "rows": result.rows}
        _print_json({**done, "skipped": skipped})
        return 0
    for i, reason in result.skipped:
        console().print(f"iteration {i} left out: {reason}", markup=False)
    console().print(f"{result.iterations} iterations, {result.rows:,} rows  {result.path}", markup=False)
    return 0


@app.command
def recipes(*, schema: Annotated[bool, Parameter(negative=())] = False, as_json: AsJson = False) -> int:
    """List the recipes, or print the schema of all settings.

    Example: `metaloom recipes --schema`

    Args:
        schema: Print the JSON schema of every setting instead.
    """
    from metaloom.flows.views.tables import recipe_rows, recipes_table
    from metaloom.pipeline.config.run import RunConfig

    if schema:
        _print_json(RunConfig.model_json_schema())
    elif as_json:
        _print_json(recipe_rows())
    else:
        console().print(recipes_table(recipe_rows()))
    return 0


@app.command
def doctor(*, env: str | None = None, overrides: Overrides = (), as_json: AsJson = False) -> int:
    """Check that this machine can train: packages, cores, disk, physics, Prefect. Or check an environment.

    Exit code 1 when something is wrong; the table says what helps.

    Example: `metaloom doctor --env my_envs:Thermostat --set env.options.target=20`

    Args:
        env: Check this environment instead: whether its answers are sound, and the same when it is run twice.
    """
    from metaloom.flows.commands.doctor import check_all
    from metaloom.flows.views.tables import doctor_table

    if env is None:
        if overrides:
            raise UsageError("found --set without --env; required both: the machine has no settings")
        checks = check_all(runs_root())
    else:
        # Imported only here: a broken package must become a line of the other table.
        from metaloom.flows.commands.check_env import check_environment, env_config

        checks = check_environment(env_config(env, overrides))
    if as_json:
        _print_json([check.as_dict() for check in checks])
    else:
        console().print(doctor_table(checks))
    return 0 if all(check.ok for check in checks) else 1


def console() -> Console:
    """A console on today's standard output; wide enough that pipes do not wrap."""
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 160
    return _Console(file=sys.stdout, width=width, soft_wrap=not sys.stdout.isatty(), highlight=False)


def _debug(run: str, stage: str | None, step: int | None, threads: int) -> int:
    from metaloom.flows.commands.debug import debug_stage
    from metaloom.flows.rollouts.workers import Backend

    at = RunAt.parse(run)
    if at.iteration is None or stage is None:
        raise UsageError(
            f"{run}: --pdb is for one stage; name it as in: metaloom replay {at.path}@0 --stage adapt --pdb"
        )
    outcome = debug_stage(at.path, at.iteration, stage, step or 0, backend=Backend(0, threads), say=_say_plain)
    console().print(str(outcome))
    return 1 if outcome.fault else 0


def _reproduce(run: str, stage: str | None, step: int | None, *, debug: bool) -> int:
    from pdb import Pdb

    from metaloom.flows.commands.debug import reproduce_kept

    at = RunAt.parse(run)
    if at.iteration is None:
        raise UsageError(f"{run}: --quarantine is about one iteration, such as {at.path}@0")
    entry = reproduce_kept(at.path, at.iteration, stage, step, debugger=Pdb() if debug else None)
    console().print(f"the episode of {entry.path} went well this time. It failed with:\n{entry.message}", markup=False)
    return 0


def _show_minibatch(
    run: storage.Run, iteration: int | None, update: int, rows: str, *, context: bool, as_json: bool
) -> int:
    from metaloom.flows.views.transition_tables import minibatch_info, minibatch_view

    if iteration is None:
        raise UsageError(f"--stage is about one iteration, such as {run.path.name}@0")
    span = parse_span("--rows", rows)
    chosen = span if isinstance(span, slice) else slice(span, span + 1 or None)
    info = minibatch_info(run, iteration, update, chosen, context=context)
    if as_json:
        _print_json(info)
    else:
        console().print(minibatch_view(info))
    return 0


def _refuse_without(option: str, **others: object) -> None:
    for name, value in others.items():
        if value not in (None, False):
            raise UsageError(f"found --{name.replace('_', '-')} without {option}; add it, or leave this out")


def _refuse_with(option: str, **others: object) -> None:
    for name, value in others.items():
        if value not in (None, False):
            raise UsageError(f"found --{name.replace('_', '-')} with {option}; leave one of them out")


def _say_plain(words: str) -> None:
    console().out(words)


def _materialise(at: RunAt, backend: "Backend", *, whole: bool, as_json: bool) -> int:
    from metaloom.flows.commands.thin import materialise
    from metaloom.flows.views.formatting import stage_label

    if not whole:
        raise UsageError("found --materialise with --stage, --step or --until-diff; it is about whole iterations")
    refs = list(materialise(at.path, at.iteration, backend=backend))
    if as_json:
        _print_json([asdict(ref) for ref in refs])
    for ref in () if as_json else refs:
        console().print(f"{ref.iteration} {stage_label(ref.stage, ref.step)}: stored again, its old digest")
    if not refs and not as_json:
        console().print("nothing was thinned there")
    return 0


def _train(start: Any, folder: Path, as_json: bool) -> int:
    from metaloom.flows.interrupt import EXIT_INTERRUPTED, stop_on_interrupt
    from metaloom.flows.views.progress import progress

    with (
        stop_on_interrupt() as should_stop,
        progress(mode="json" if as_json else "auto", should_stop=should_stop, out=sys.stdout) as observer,
    ):
        result = start(replace(observer, iteration_done=_unwatched(observer.iteration_done)))
    say = _unwatched(_say)
    if result.stopped:
        place = storage.location(folder)
        say(as_json, f"stopped after {result.iterations_done} iterations; go on with: metaloom resume {place}")
        return EXIT_INTERRUPTED
    say(as_json, _closing_words(result.path))
    return 0


def _closing_words(folder: Path) -> str:
    files = _write_report(storage.open_run(folder), report_folder(folder))
    place = storage.location(folder)
    name = folder.name if run_folder(folder.name) == folder else place
    question = f"from metaloom import storage; print(storage.open_run({place!r}).episodes().to_pandas())"
    return "\n".join(
        [
            f"\nrun             {place}",
            f"learning curve  {files.png}",
            f"report page     {files.html}",
            "\nlook further:",
            f"  {_program('metaloom')} show {name}",
            f"  {_program('metaloom')} replay {name}@0",
            f"  {_program('python')} -c {question!r}",
        ]
    )


def _write_report(run: storage.Run, folder: Path) -> "ReportFiles":
    from metaloom.flows.views.report import write_report

    try:
        return write_report(run, folder)
    except OSError as error:
        raise storage.StorageFailed(
            folder,
            found=error.strerror or str(error),
            required="a folder to write the report to",
            action=f"Free space, or choose another: `metaloom report {run.path} --out FOLDER`",
        ) from error


def _program(name: str) -> str:
    """How to call a program of this environment: by its name where that finds it, else by its path."""
    ours = Path(sys.executable).with_name(name)
    found = shutil.which(name)
    if not ours.exists() or (found and Path(found).parent == ours.parent):
        return name
    return os.path.relpath(ours)


def _say(as_json: bool, words: str) -> None:
    # With --json, standard output carries JSON alone.
    if as_json:
        print(words, file=sys.stderr)
    else:
        console().out(words)


def _print_json(value: Any) -> None:
    console().out(json.dumps(value, indent=2, default=str, allow_nan=False))


def _unwatched(tell: Callable[..., None]) -> Callable[..., None]:
    """The same, except that training goes on when nobody reads what it prints any more."""

    def tell_if_read(*arguments: Any) -> None:
        try:
            tell(*arguments)
        except (OutputClosed, BrokenPipeError):
            _discard_output()

    return tell_if_read


def _discard_output() -> None:
    # Also what is still buffered: Python would fail to write it when it exits.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()

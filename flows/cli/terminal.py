"""Terminal output of operations: questions, progress, and lines printed before the result."""

import json
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from metaloom.flows.cli.generated import Call
from metaloom.flows.cli.output import OutputClosed, answer, console, print_json, say
from metaloom.flows.errors import FAILURE, UsageError
from metaloom.flows.films.opengl import choose_renderer
from metaloom.flows.formatting import plural, size, stage_name
from metaloom.flows.operations import late
from metaloom.flows.operations.options import Overrides, agree, complete_recipes, refuse_with, refuse_without
from metaloom.flows.operations.replay import materialise as restore
from metaloom.flows.operations.rm import check_removable, dependents
from metaloom.flows.operations.show import found
from metaloom.flows.results.disk import bytes_freed
from metaloom.flows.rollouts.backend import Backend
from metaloom.flows.runs import RunAt, folders_of, require_one_iteration, run_folder
from metaloom.flows.views.parts import as_text
from metaloom.flows.views.status import STATUS
from metaloom.pipeline.shown import printable
from metaloom.storage import Writer, argument, current_writer, open_run

if TYPE_CHECKING:
    from metaloom.flows.opened import Run
    from metaloom.flows.operations.cancel import Cancelled
    from metaloom.flows.results.comparison import Comparison
    from metaloom.flows.results.counterfactual import Counterfactual
    from metaloom.flows.results.disk import Removed
    from metaloom.flows.results.evaluation import EvaluationOutcome
    from metaloom.flows.results.replay import Replay, StageReplay
    from metaloom.flows.run_log import LogLine
    from metaloom.flows.trained.policy import TrainedPolicy
    from metaloom.flows.views.watching import Ending
    from metaloom.pipeline.types import EpisodeBatch


def fork(call: "Call[Run]") -> int:
    """Fork a run and print what it shares with its parent."""
    parent = RunAt.of(call["parent"], learner=True).path
    call(account=lambda made: console().print(late.fork_view(made, parent)))
    return 0


def policy(call: "Call[TrainedPolicy]") -> int:
    """Write a policy to a file, and print the policy's description and the path."""
    console().print(f"{call()!r}  {call['out']}", markup=False)
    return 0


def compare(
    call: "Call[Comparison]",
    *,
    plot: Annotated[
        Path | None,
        Parameter(
            help="Plot means, curves, profiles and probabilities of improvement in this .png, .svg or .pdf file."
        ),
    ] = None,
    as_json: bool,
) -> int:
    """Print a comparison, and plot it if requested."""
    if plot is not None:
        late.check_plot_file(plot)
    found = call()
    # Print first, since a full disk may prevent writing the plot.
    call.show(found, as_json)
    if plot is not None:
        late.write_plot(plot, found.plot())
    return 0


def optimize(
    call: "Call[Counterfactual]",
    *,
    grid: Annotated[
        Sequence[str], Parameter(help="Try several values: `--grid algorithm.clip_eps=0.1,0.2`. Repeatable.")
    ] = (),
    as_json: bool,
) -> int:
    """Recompute a stage for each combination of values in a grid, and print the comparison."""
    path, iteration = require_one_iteration(call["run"], None)
    agree(path, call["trust"])
    values = late.parse_grid(grid)
    results: list[Counterfactual] = []
    computed = late.optimize_grid(path, iteration, values, call["overrides"], stage=call["stage"], step=call["step"])
    for result in computed:
        results.append(result)
        STATUS.far(f"{len(results)} of {prod(map(len, values.values()))} settings")
    table = (lambda: late.grid_table(results)) if values else (lambda: late.counterfactual_table(results[0]))
    answer(as_json, lambda: [result.as_dict() for result in results], table)
    return 0


def rm(call: "Call[Removed]", *, yes: Annotated[bool, Parameter(help="Do not ask for confirmation.")] = False) -> int:
    """Remove runs after asking for confirmation."""
    paths = list(dict.fromkeys(map(check_removable, folders_of(call["runs"]))))
    for path in paths:
        console().out(f"to remove: {path}")
        for line in dependents(path, path.parent):
            console().out(f"  {line}")
    if paths and not yes:
        if not sys.stdin.isatty():
            raise UsageError("cannot ask for confirmation without a terminal; pass --yes")
        STATUS.end()
        said = input(f"{plural(len(paths), 'run')}, {size(bytes_freed(paths))} to be freed. Remove? [y/N] ")
        if said.strip().lower() not in ("y", "yes"):
            console().out("nothing removed")
            return 1
    with nullcontext() if yes else STATUS.shown("removing", console()):
        removed = call()
    console().out(str(removed))
    return 0


def cancel(call: "Call[Cancelled]") -> int:
    """Cancel a run; print which process is asked to stop, and how it ended."""
    out = console().out

    def asked(writer: Writer) -> None:
        out(f"asked {writer} to finish its stage and stop; Ctrl-C ends the wait but not the request")
        if writer.is_stopped:
            again, end = (f"kill -{signal} {writer.pid}" for signal in ("CONT", 9))
            out(f"it is suspended and does not respond; `{again}` lets it continue, `{end}` ends it")

    try:
        done = call(asked=asked)
    except KeyboardInterrupt:
        out("\nno longer waiting; the request stands")
        return 0
    out(str(done))
    return 0 if done.went_well else 1


def watch(call: "Call[Ending]", *, as_json: bool) -> int:
    """Watch a training run and print how it ended; Ctrl-C stops only the watching."""
    STATUS.end()
    with suppress(KeyboardInterrupt):
        try:
            ending = call(lines=as_json)
        except BrokenPipeError:
            raise OutputClosed from None
        say(as_json, ending.message)
        return 0 if ending.went_well else 1
    return 0


def logs(
    call: "Call[list[LogLine]]",
    *,
    follow: Annotated[
        bool,
        Parameter(
            name=("--follow", "-f"),
            help="Print new lines as they are logged, until the training ends or you press Ctrl-C.",
        ),
    ] = False,
    as_json: bool,
) -> int:
    """Print the lines of a log, followed by new ones as they are added if `follow` is True."""
    opened = open_run(run_folder(call["run"]))
    reader, any_line = late.LogReader(opened.path), False

    def text(line: late.LogLine) -> str:
        if as_json:
            return json.dumps(line.fields)
        where = f" {line.ref.iteration} {line.ref.stage} k={line.ref.step}" if line.ref else ""
        return f"{line.time[:19].replace('T', ' ')} {line.level:7}{printable(where)}  {line.message}"

    with suppress(KeyboardInterrupt):
        while True:
            writer = current_writer(opened.path, opened.files.remote)
            for line in reader.new_lines():
                any_line = True
                if line.is_at_least(call["level"]):
                    console().out(text(line))
            if not follow or writer is None:
                break
            time.sleep(0.5)
    if not any_line and not as_json:
        console().out(
            f"no log of {opened.location} here: the run was trained by an earlier version or on another machine, or "
            "copied without its log"
        )
    return 0


def view(call: "Call[None]") -> int:
    """Serve the page and print its address."""
    STATUS.end()
    call(opened=lambda address: console().out(f"{address}  (press Ctrl-C to stop)"))
    return 0


def graph(call: "Call[str]") -> int:
    drawing = call()
    STATUS.end()
    print(drawing, end="")
    return 0


def show(
    call: "Call[Any]",
    *,
    everything: Annotated[
        bool, Parameter(name="--all", help="Show all settings of a run, its environment and its disk usage.")
    ] = False,
    as_json: bool,
) -> int:
    """Print a run or its stages, as JSON data or as formatted text."""
    given = {**call.given}
    answer(as_json, *found(RunAt.parse(given.pop("run")), **given, everything=everything))
    return 0


def replay(
    call: "Call[Replay]",
    *,
    pdb: Annotated[
        bool,
        Parameter(help="Run one stage, stored or not, in this process, and enter Python's debugger if it fails."),
    ] = False,
    materialise: Annotated[
        bool, Parameter(help="Recompute thinned outputs and store them again if their digests are unchanged.")
    ] = False,
    quarantine: Annotated[
        bool, Parameter(help="Replay, in this process, the quarantined episode in which the environment failed.")
    ] = False,
    as_recorded: Annotated[
        bool,
        Parameter(
            help="Use the CPU code paths of BLAS, torch and NumPy that the run records, as far as the processor "
            "supports them. By default, each library chooses its code path for this processor."
        ),
    ] = False,
    as_json: bool,
) -> int:
    """Replay stages, and print each comparison."""
    stage, step, until_diff, backend = (call[name] for name in ("stage", "step", "until_diff", "backend"))
    if quarantine or pdb:
        STATUS.end()  # the debugger uses the terminal
        usual = asdict(Backend(workers=0, threads=backend.threads if backend.workers == 0 else 1))
        given = {name: value for name, value in asdict(backend).items() if value != usual[name]}
        elsewhere = {name.removesuffix("_seconds"): value for name, value in given.items()}
        option = "--quarantine" if quarantine else "--pdb"
        refuse_with(option, until_diff=until_diff, materialise=materialise, json=as_json, **elsewhere)
    at = RunAt.parse(call["run"])
    agree(at.path, call["trust"])
    if as_recorded:
        run = open_run(at.path)
        iterations = run.select(None) if at.iteration is None else [at.iteration]
        late.start_as_recorded(run, iterations)
        if not as_json:
            console().print(as_text(late.arithmetic_of(run, iterations)))
    if quarantine:
        if at.iteration is None:
            raise UsageError(f"{at.path}: --quarantine requires one iteration, such as {at.path}@0")
        from pdb import Pdb

        entry = late.reproduce_kept(at.path, at.iteration, stage, step, debugger=Pdb() if pdb else None)
        done = f"the episode of {entry.path} completed without a failure this time."
        console().print(f"{done} The stored failure:\n{entry.message}", markup=False)
        return 0
    if pdb:
        if at.iteration is None or stage is None:
            example = f"metaloom replay {argument(at.path)}@0 --stage adapt --pdb"
            raise UsageError(f"{at.path}: --pdb requires one stage; name it, as in: {example}")
        outcome = late.debug_stage(at.path, at.iteration, stage, step or 0, backend=backend, say=console().out)
        console().print(str(outcome))
        return 1 if outcome.fault else 0
    if materialise:
        if stage is not None or step is not None or until_diff:
            raise UsageError("--materialise restores whole iterations; remove --stage, --step and --until-diff")
        refs = restore(at.path, at.iteration, backend=backend)
        lines = [f"iteration {ref.iteration}, {stage_name(ref)}: stored again with the same digest" for ref in refs]
        answer(as_json, lambda: [asdict(ref) for ref in refs], lambda: "\n".join(lines) or "no outputs are thinned")
        return 0
    return _replay(call, as_recorded=as_recorded, as_json=as_json)


def _replay(call: "Call[Replay]", *, as_recorded: bool, as_json: bool) -> int:
    stages = 0

    def replayed(outcome: "StageReplay") -> None:
        nonlocal stages
        stages += 1
        STATUS.far(plural(stages, "stage"))
        if not as_json:
            console().print(late.replay_line(outcome))

    outcomes = call(replayed=replayed)
    different = [outcome for outcome in outcomes if not outcome.identical]
    if as_json:
        print_json([outcome.as_dict() for outcome in outcomes])
    elif different:
        console().print(late.difference_table([array for outcome in different for array in outcome.differences]))
        changed = dict.fromkeys(change for outcome in different for change in outcome.changed)
        changes = "; ".join(changed) or "nothing that is recorded"
        console().print(as_text(f"Changed since it was computed: {changes}"))
        if not as_recorded and any(change.startswith("arithmetic of ") for change in changed):
            console().print("`--as-recorded` uses the recorded CPU code paths if the processor supports them")
    elif outcomes:
        thinned = sum(outcome.with_record for outcome in outcomes)
        were, records = ("was", "its record") if thinned == 1 else ("were", "their records")
        about = f"; {thinned} of them {were} thinned and compared only with {records}" if thinned else ""
        console().print(f"{plural(len(outcomes), 'stage')} replayed: all {outcomes[-1].proved}{about}")
    else:
        console().print("nothing to replay")
    return 1 if different else 0


def evaluate(
    call: "Call[EvaluationOutcome]",
    *,
    plot: Annotated[
        Path | None, Parameter(help="Plot return against adaptation episodes in this .png, .svg or .pdf file.")
    ] = None,
    video: Annotated[
        Path | None,
        Parameter(
            help="Write a video of test episodes before and after adaptation to this .gif, .webp or .mp4 file (.png: "
            "the last frame only). It shows the median-return task and its median-return episodes."
        ),
    ] = None,
    as_json: bool,
) -> int:
    """Evaluate a learner, print its returns, and write the plot and video that were requested."""
    at = RunAt.of(call["run"], learner=True)
    if plot is not None:
        late.check_plot_file(plot)
    agree(at.path, call["trust"])
    film = None
    if video is not None:
        renderer = choose_renderer("auto")  # before MuJoCo is imported
        film = late.EvaluationFilm(video, late.config_of(open_run(at.path)).env, renderer)

    def tested(k: int, episodes: "EpisodeBatch") -> None:
        STATUS.far(f"tested after {plural(k, 'step')}")
        if film is not None:
            film.tested(k, episodes)

    outcome = call(tested=tested)
    # Print first, since a full disk may prevent writing the plot or video.
    call.show(outcome, as_json)
    if plot is not None:
        late.write_plot(plot, outcome.plot())
    if film is None:
        return 0
    done = film.write(outcome, at.path.name)
    say(as_json, str(done))
    return 0 if done.agrees else FAILURE


def recipes(
    call: Call[list[str]],
    recipe: Annotated[
        str | None,
        Parameter(help="Print all settings of this recipe or settings file.", completer=complete_recipes),
    ] = None,
    *,
    form: Annotated[
        Literal["yaml", "toml", "json"] | None, Parameter(name="--format", help="File format; yaml by default.")
    ] = None,
    overrides: Overrides = (),
    schema: Annotated[bool, Parameter(help="Print the JSON schema of every setting instead.")] = False,
    envs: Annotated[
        bool, Parameter(help="List the environments instead; recipes accept any of them with `--set env=NAME`.")
    ] = False,
    as_json: bool,
) -> int:
    """Print the list of recipes, the settings of one of them, the list of environments, or the settings schema."""
    if recipe is not None:
        refuse_with("a recipe", schema=schema, envs=envs, json=as_json)
        text = late.settings_file(late.new_config(recipe, overrides), form or "yaml")
        STATUS.end()
        print(text, end="")
        return 0
    refuse_without("a recipe", format=form, set=overrides or None)
    if envs:
        refuse_with("--envs", schema=schema)
        names = late.PLUGINS.names()
        answer(as_json, lambda: names, lambda: "\n".join(names))
        return 0
    if schema:
        print_json(late.RunConfig.model_json_schema())
    else:
        answer(as_json, late.recipe_rows, lambda: late.recipes_table(late.recipe_rows()))
    return 0

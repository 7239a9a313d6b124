"""`metaloom show`."""

from typing import Annotated, Literal

from cyclopts import Parameter

from metaloom.flows.cli.options import AsJson, Flag, RunAtArgument, Trust, agree, refuse_with, refuse_without
from metaloom.flows.cli.output import answer
from metaloom.flows.errors import UsageError
from metaloom.flows.runs import RunAt, parse_span, require_iteration
from metaloom.storage import Run, open_run


def show(
    run: RunAtArgument,
    *,
    stage: Literal["process_samples", "sample_transitions"] | None = None,
    step: int | None = None,
    update: int | None = None,
    rows: str | None = None,
    context: Flag = False,
    everything: Annotated[bool, Parameter(name="--all", negative=(), show_default=False)] = False,
    trust: Trust = False,
    as_json: AsJson = False,
) -> int:
    """Show a run, or the stages of one iteration.

    Of a run: its state, metrics and sizes, and the settings that differ from the defaults.

    Example: `metaloom show first@3`

    Args:
        stage: sample_transitions: the transitions behind the row numbers that it drew, and where each comes from;
            process_samples: the parameters of the baselines that it fitted.
        step: Inner step of process_samples; 0 by default.
        update: Gradient step of the iteration whose transitions to show; the first by default.
        rows: Transitions of the minibatch: N or FROM:TO, counted like Python slices; 0:20 by default, `:` for all.
        everything: Show every setting of a run, its environment and its sizes on disk.
        context: Show the transitions that tasks were inferred from instead of those that were learned from.
    """
    at = RunAt.parse(run)
    opened = open_run(at.path)
    if at.iteration is not None:
        refuse_with("RUN@ITERATION", all=everything)
        require_iteration(opened, at.iteration)
    agree(at.path, trust)
    if stage == "process_samples":
        refuse_with("--stage process_samples", update=update, rows=rows, context=context)
    else:
        refuse_without("--stage process_samples", step=step)
    if stage is not None:
        if at.iteration is None:
            raise UsageError(f"--stage is about one iteration, such as {opened.path.name}@0")
        if stage == "process_samples":
            return _show_baselines(opened, at.iteration, step or 0, as_json=as_json)
        return _show_minibatch(opened, at.iteration, update or 0, rows or "0:20", context=context, as_json=as_json)
    refuse_without("--stage sample_transitions", update=update, rows=rows, context=context)
    from metaloom.flows.views.run_info import iteration_info, run_info
    from metaloom.flows.views.tables import iteration_view, run_view

    if (i := at.iteration) is None:
        answer(as_json, lambda: run_info(opened), lambda: run_view(opened, everything=everything))
    else:
        answer(as_json, lambda: iteration_info(opened, i), lambda: iteration_view(opened, i))
    return 0


def _show_baselines(run: Run, iteration: int, step: int, *, as_json: bool) -> int:
    from metaloom.flows.commands.baselines import fitted_baselines
    from metaloom.flows.views.tables import parameters_table

    fitted = fitted_baselines(run, iteration, step)
    lists = {name: {part: value.tolist() for part, value in params.items()} for name, params in fitted.items()}
    answer(as_json, lambda: lists, lambda: parameters_table(fitted))
    return 0


def _show_minibatch(run: Run, iteration: int, update: int, rows: str, *, context: bool, as_json: bool) -> int:
    span = parse_span("--rows", rows)
    from metaloom.flows.views.transition_tables import minibatch_info, minibatch_view

    chosen = span if isinstance(span, slice) else slice(span, span + 1 or None)
    info = minibatch_info(run, iteration, update, chosen, context=context)
    answer(as_json, lambda: info, lambda: minibatch_view(info))
    return 0

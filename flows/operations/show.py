"""`show`: shows a run, or the stages of one iteration."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from metaloom.flows.arguments import checked
from metaloom.flows.errors import UsageError
from metaloom.flows.operations import late
from metaloom.flows.operations.options import (
    Iteration,
    Natural,
    RunAtArgument,
    Trust,
    agree,
    refuse_with,
    refuse_without,
)
from metaloom.flows.results.run_rows import Facts
from metaloom.flows.runs import RunAt, parse_span, require_iteration
from metaloom.storage import StageRef, open_run

if TYPE_CHECKING:
    from rich.console import RenderableType

    DataAndView = tuple[Callable[[], Any], Callable[[], RenderableType]]


@checked
def show(
    run: RunAtArgument,
    iteration: Iteration = None,
    *,
    stage: str | None = None,
    step: Natural | None = None,
    update: Natural | None = None,
    rows: str | None = None,
    context: bool = False,
    trust: Trust = False,
) -> Facts:
    """Show a run, or the stages of one iteration.

    For a run, it shows the state, metrics and sizes, and the settings that differ from the defaults (all for a custom
    algorithm).

    Example: `metaloom show first@3`

    Args:
        run: Run to show.
        iteration: Iteration to show; the run itself if None.
        stage: Stage of the iteration, shown with its inputs and its arrays with axes, units and meaning. For
            sample_transitions, this includes the drawn transitions and the origin of each; for process_samples, the
            parameters of the fitted baselines.
        step: Inner step of the stage; 0 by default.
        update: Gradient step whose transitions are shown; the iteration's first by default.
        rows: Transitions of the minibatch to show: N or FROM:TO, as in Python slicing; 0:20 by default,
            `:` for all.
        context: Show the transitions from which tasks were inferred, instead of those used for the update.
        trust: Allow importing the modules that the run's settings name, now and later.
    """
    at = RunAt.of(run, iteration)
    return Facts(found(at, stage=stage, step=step, update=update, rows=rows, context=context, trust=trust)[0]())


def found(
    at: RunAt,
    *,
    stage: str | None = None,
    step: int | None = None,
    update: int | None = None,
    rows: str | None = None,
    context: bool = False,
    trust: bool = False,
    everything: bool = False,
) -> "DataAndView":
    """Return two functions: one returns the requested facts as data, the other renders them."""
    opened = open_run(at.path)
    if stage not in (None, *(names := [known.name for known in opened.stages.stages])):
        raise UsageError(f"the run has no stage {stage}; --stage must be one of {', '.join(names)}")
    if at.iteration is not None:
        refuse_with("RUN@ITERATION", all=everything)
        require_iteration(opened, at.iteration)
    agree(at.path, trust)
    if stage is None:
        refuse_without("--stage STAGE", step=step)
    if stage == "sample_transitions":
        refuse_with("--stage sample_transitions", step=step)
    else:
        refuse_without("--stage sample_transitions", update=update, rows=rows, context=context)
    if (i := at.iteration) is None:
        if stage is not None:
            raise UsageError(f"--stage requires one iteration, such as {opened.path.name}@0")
        return lambda: late.run_info(opened), lambda: late.run_view(opened, everything=everything)
    if stage is None:
        return lambda: late.iteration_info(opened, i), lambda: late.iteration_view(opened, i)
    if stage == "process_samples":
        fitted = late.fitted_baselines(opened, i, step or 0)
        lists = {name: {part: value.tolist() for part, value in params.items()} for name, params in fitted.items()}
        return lambda: lists, lambda: late.parameters_table(fitted)
    if stage == "sample_transitions":
        span = parse_span("--rows", rows or "0:20")
        chosen = span if isinstance(span, slice) else slice(span, span + 1 or None)
        drawn = late.minibatch_info(opened, i, update or 0, chosen, context=context)
        return lambda: drawn, lambda: late.minibatch_view(drawn)
    info = late.output_info(opened, StageRef(i, stage, step or 0))
    return lambda: info, lambda: late.output_view(info)

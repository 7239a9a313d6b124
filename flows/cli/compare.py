"""`metaloom compare`."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from metaloom.flows.cli.options import AsJson, Flag, complete_runs
from metaloom.flows.cli.output import answer

Runs = Annotated[
    tuple[str, ...],
    Parameter(
        help="Names under the runs folder, paths, patterns such as `lr-*`, or the names of sweeps.",
        negative=(),
        completer=complete_runs,
    ),
]


def compare(
    runs: Runs,
    /,
    *,
    metric: str | None = None,
    group: Annotated[tuple[str, ...], Parameter(negative=(), show_default=False)] = (),
    last: int = 10,
    mixed: Flag = False,
    seed: int = 0,
    plot: Path | None = None,
    as_json: AsJson = False,
) -> int:
    """Compare runs, with intervals over seeds.

    Runs of a group differ only in their seed. Each group has an interquartile mean.

    Says of every two groups whether one is shown to be higher, and when there are too few seeds to tell. Runs are
    compared after as many environment steps as all of them have.

    Example: `metaloom compare first second --metric return --plot comparison.png`

    Args:
        metric: `evaluation`: the return on held-out tasks after the last adaptation step, by default where all runs
            have stored evaluations; `return`: that of training after adaptation; or the name of any metric.
        group: Group by this setting alone, whatever else runs differ in: `--group algorithm.inner_lr`. Repeatable.
        last: Iterations of training that `return` and other metrics are averaged over.
        mixed: Compare runs of different environments or evaluations all the same.
        seed: Seed of the bootstrap.
        plot: Plot means, curves, profiles and probabilities of improvement into this .png, .svg or .pdf file.
    """
    if plot is not None:
        from metaloom.flows.views.evaluation_plots import check_plot_file

        check_plot_file(plot)
    from metaloom.flows.commands.compare import compare as compare_runs
    from metaloom.flows.run_names import runs_named
    from metaloom.flows.views.run_comparison import comparison_view

    found = compare_runs(runs_named(runs), metric=metric, group=group, last=last, mixed=mixed, seed=seed)
    # First, since a full disk may keep a picture from being written.
    answer(as_json, found.as_dict, lambda: comparison_view(found))
    if plot is not None:
        from metaloom.flows.views.evaluation_plots import write_plot

        write_plot(plot, found.plot())
    return 0

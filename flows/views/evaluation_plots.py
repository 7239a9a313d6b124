"""Pictures of evaluations, over adaptation; and the files of single pictures."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from metaloom.flows.errors import UsageError
from metaloom.flows.results.evaluation_summary import summarize_steps
from metaloom.flows.views import charts
from metaloom.flows.views.history import INTERVAL, INTERVAL_NOTE, interquartile_means
from metaloom.flows.views.series import AFTER, BEFORE, Chart, Lines, Series, chart_of
from metaloom.pipeline.types import Evaluation
from metaloom.storage.errors import system_errors

WRITERS: dict[str, Callable[[Figure], bytes]] = {
    ".png": charts.png_bytes,
    ".svg": charts.svg_bytes,
    ".pdf": charts.pdf_bytes,
}


def check_plot_file(path: Path) -> None:
    """Refuse a picture that could not be written, before any work is done."""
    if path.suffix not in WRITERS or not path.absolute().parent.is_dir() or path.is_dir():
        raise UsageError(f"found plot file {str(path)!r}; required a .png, .svg or .pdf file in a folder that exists")


def write_plot(path: Path, figure: Figure) -> None:
    """Write a figure as PNG, SVG or PDF, as the suffix says."""
    with system_errors(
        path, required="room and permission to write a plot", action="Free space, or choose another file"
    ):
        path.write_bytes(WRITERS[path.suffix](figure))


def per_shot_curve(title: str, evaluation: Evaluation) -> Figure:
    """Draw `per_shot_chart`."""
    return charts.draw(per_shot_chart(title, evaluation))


def per_shot_chart(title: str, evaluation: Evaluation) -> Chart:
    """Test return against the number of episodes that a task's policy has adapted to."""
    steps = summarize_steps(evaluation)
    n = evaluation.episodes_per_step
    per_step = (
        f"an adaptation step after every {'episode' if n == 1 else f'{n} episodes'}; "
        if evaluation.adaptation_steps
        else ""
    )
    series = (
        Series("interquartile mean", AFTER, *interquartile_means(steps)),
        Series("mean", BEFORE, np.array([step.average_return for step in steps])),
    )
    lines = Lines("evaluation_adaptation", title, "return of test episodes", per_step + INTERVAL_NOTE, INTERVAL, series)
    episodes = np.array([step.adaptation_episodes for step in steps], np.float64)
    return chart_of(lines, "Evaluation", episodes, "adaptation episodes per task")

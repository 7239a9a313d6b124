"""Terminal part of `metaloom evaluate`: charts and films, written after the table is printed."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from metaloom.flows.cli.generated import Call, show_result
from metaloom.flows.cli.output import say
from metaloom.flows.errors import FAILURE
from metaloom.flows.films.opengl import choose_renderer
from metaloom.flows.formatting import plural
from metaloom.flows.operations import late, operations
from metaloom.flows.operations.options import agree
from metaloom.flows.runs import RunAt
from metaloom.flows.views.status import STATUS
from metaloom.storage import open_run

if TYPE_CHECKING:
    from metaloom.flows.commands.evaluation_film import EvaluationFilm
    from metaloom.flows.results.evaluation import EvaluationOutcome
    from metaloom.pipeline.types import EpisodeBatch


def evaluate(
    call: "Call[EvaluationOutcome]",
    *,
    plot: Annotated[
        Path | None, Parameter(help="Plot return against adaptation episodes into this .png, .svg or .pdf file.")
    ] = None,
    video: Annotated[
        Path | None,
        Parameter(
            help="Film test episodes before and after adaptation into this .gif, .webp or .mp4 file (.png: the last "
            "picture alone): of the task of median return, its episodes of median return."
        ),
    ] = None,
    as_json: bool = False,
) -> int:
    """Print returns, and write the pictures that are wanted."""
    at = RunAt.of(call["run"], learner=True)
    if plot is not None:
        late.check_plot_file(plot)
    agree(at.path, call["trust"])
    film = None if video is None else _film(video, at.path)

    def tested(k: int, episodes: "EpisodeBatch") -> None:
        STATUS.far(f"tested after {plural(k, 'step')}")
        if film is not None:
            film.tested(k, episodes)

    outcome = call(tested=tested)
    # First, since a full disk may keep pictures from being written.
    show_result(operations()["evaluate"], outcome, as_json)
    if plot is not None:
        late.write_plot(plot, outcome.plot())
    if film is None:
        return 0
    done = film.write(outcome, at.path.name)
    shown = ", ".join(f"{value:.2f} after {plural(k, 'step')}" for k, value in done.returns.items())
    say(as_json, f"{done.path}  {done.frames} frames, task {done.task}, return {shown}\n{done.agreement}")
    return 0 if done.agrees else FAILURE


def _film(out: Path, run: Path) -> "EvaluationFilm":
    renderer = choose_renderer("auto")  # before MuJoCo is imported
    return late.EvaluationFilm(out, late.config_of(open_run(run)).env, renderer)

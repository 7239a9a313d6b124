"""`report`: the charts of a run as one HTML page."""

import base64
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Literal

from metaloom.flows.arguments import checked
from metaloom.flows.films.opengl import choose_renderer
from metaloom.flows.operations import late
from metaloom.flows.operations.options import RunArgument, Trust, agree, refuse_without
from metaloom.flows.runs import folder_of, report_folder
from metaloom.flows.views.status import STATUS
from metaloom.storage import Run, argument, open_run
from metaloom.storage.errors import system_errors

if TYPE_CHECKING:
    from metaloom.flows.views.page import Picture
    from metaloom.flows.views.report import ReportFiles


@checked
def report(
    run: RunArgument,
    *,
    out: Path | str | None = None,
    static: bool = False,
    video: bool = False,
    figures: Path | str | None = None,
    format: Literal["svg", "pdf"] | None = None,
    trust: Trust = False,
) -> "ReportFiles":
    """Write the charts of a run as one HTML page.

    The learning curve is written as PNG too.

    The page is about 2 MB, most of it the script that draws its charts, and needs no network.

    Example: `metaloom report first`

    Args:
        run: The run.
        out: Folder for the files; reports/NAME in the runs folder by default.
        static: Use images instead of zoomable charts, so that the page runs no scripts.
        video: Add a video of the best task of the last iteration, before and after adaptation.
        figures: Folder for every chart as a separate file, for a paper.
        format: Format of these files: svg (the default) or pdf.
        trust: Import the modules that the run's settings name, now and later.
    """
    if figures is None:
        refuse_without("--figures", format=format)
    if not video:
        refuse_without("--video", trust=trust)
    opened = open_run(folder_of(run))
    agree(opened.path, trust)
    film = _film(opened) if video else None
    folder = report_folder(opened.path) if out is None else Path(out)
    files = write(opened, folder, static=static, film=film)
    if figures is None:
        return files
    place, action = Path(figures), "Free space, or choose another folder"
    with system_errors(place, required="a folder to write figures to", action=action):
        return replace(files, figures=tuple(late.write_figures(opened, place, format or "svg")))


def _film(run: Run) -> "Picture":
    """Film the best task of the last iteration as an animated image for a page."""
    renderer = choose_renderer("auto")  # before MuJoCo is imported
    with TemporaryDirectory() as folder:
        file = Path(folder) / "film.webp"
        film = late.film_run(run.path, -1, file, task="best", renderer=renderer)
        source = "data:image/webp;base64," + base64.b64encode(file.read_bytes()).decode()
    caption = "An episode of median return of the best task, simulated again from its seed and its stored actions."
    if not film.agrees:
        caption += (
            f" It does not show what happened: observations differ by up to {film.largest_difference:.3g} from the "
            "stored ones."
        )
    return late.Picture(source, "Film of an episode before and after adaptation", caption, enlarged=False)


def write(run: Run, folder: Path, *, static: bool = False, film: "Picture | None" = None) -> "ReportFiles":
    """Write the report of a run to a folder.

    Raises:
        StorageFailed: the system refuses the write.
    """
    with system_errors(
        folder,
        required="a folder to write the report to",
        action=f"Free space, or choose another: `metaloom report {argument(run.path)} --out FOLDER`",
    ):
        return late.write_report(
            run, folder, static=static, film=film, on_progress=STATUS.counted("tables and records")
        )

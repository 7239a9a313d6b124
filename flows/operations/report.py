"""`report`: writes a run's charts to an HTML page."""

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
    """Write a run's charts to a single HTML page.

    The learning curve is also written as a PNG. The page is about 2 MB, most of which is the script that draws the
    charts. It works offline.

    Example: `metaloom report first`

    Args:
        run: Run to report.
        out: Output folder; reports/NAME in the runs folder by default.
        static: Use images instead of zoomable charts, so that the page runs no scripts.
        video: Add a video of the last iteration's best task, before and after adaptation.
        figures: Folder to which each chart is written as a separate file, for use in a paper.
        format: Format of these files: svg (the default) or pdf.
        trust: Allow importing the modules that the run's settings name, now and later.
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
    """Return a video of the last iteration's best task as an animated image to embed in the page."""
    renderer = choose_renderer("auto")  # before MuJoCo is imported
    with TemporaryDirectory() as folder:
        file = Path(folder) / "film.webp"
        film = late.film_run(run.path, -1, file, task="best", renderer=renderer)
        source = "data:image/webp;base64," + base64.b64encode(file.read_bytes()).decode()
    caption = "The median-return episode of the best task, simulated again from its seed and stored actions."
    if not film.agrees:
        caption += f" It does not match the stored episode: observations differ by up to {film.largest_difference:.3g}."
    return late.Picture(source, "Video of an episode before and after adaptation", caption, enlarged=False)


def write(run: Run, folder: Path, *, static: bool = False, film: "Picture | None" = None) -> "ReportFiles":
    with system_errors(
        folder,
        required="a folder to write the report to",
        action=f"Free space, or choose another: `metaloom report {argument(run.path)} --out FOLDER`",
    ):
        return late.write_report(
            run, folder, static=static, film=film, on_progress=STATUS.counted("tables and records")
        )

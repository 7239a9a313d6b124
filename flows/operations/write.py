"""Operations that write reports, videos and policies to files."""

import base64
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from metaloom.flows.arguments import checked
from metaloom.flows.errors import UsageError
from metaloom.flows.films.opengl import RendererName, choose_renderer
from metaloom.flows.operations import late
from metaloom.flows.operations.options import (
    Iteration,
    LearnerArgument,
    Positive,
    PythonOnly,
    RunArgument,
    RunAtArgument,
    Trust,
    agree,
    refuse_without,
)
from metaloom.flows.runs import RunAt, folder_of, report_folder
from metaloom.flows.views.status import STATUS
from metaloom.storage import Run, argument, open_run
from metaloom.storage.errors import system_errors

if TYPE_CHECKING:
    from metaloom.flows.films.video import Film
    from metaloom.flows.trained.policy import TrainedPolicy
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
    """Write a run's report to a folder and return its files."""
    with system_errors(
        folder,
        required="a folder to write the report to",
        action=f"Free space, or choose another: `metaloom report {argument(run.path)} --out FOLDER`",
    ):
        return late.write_report(
            run, folder, static=static, film=film, on_progress=STATUS.counted("tables and records")
        )


@checked
def video(
    run: RunAtArgument,
    out: Annotated[Path | str, Parameter(name="--out")],
    iteration: Iteration = None,
    *,
    task: int | Annotated[Literal["best", "worst"], PythonOnly] | None = None,
    best: bool = False,
    worst: bool = False,
    episode: int | None = None,
    steps: Annotated[Sequence[int], Parameter(name="--step")] = (),
    size: str | Annotated[tuple[int, int], PythonOnly] = "480x360",
    every: Positive = 1,
    renderer: RendererName = "auto",
    trust: Trust = False,
) -> "Film":
    """Make a video of an episode before and after adaptation.

    Both are shown side by side. The episode is simulated again from its seed and its stored actions. If an observation
    differs from the stored one by more than 1e-5, the command reports it and exits with code 1.

    Example: `metaloom video first@12 --best --out cheetah.gif`

    Args:
        run: Run that contains the episode.
        out: File to write: .gif, .webp, .mp4 (needs `metaloom[video]`), or .png for only the last frame.
        iteration: Iteration, counted from the end if negative; the newest complete iteration if None.
        task: Index of the task in the iteration; 0 by default.
        best: Show the task with the highest mean return after adaptation.
        worst: Show the task with the lowest mean return after adaptation.
        episode: Index of the episode within its task; by default, the median-return episode at each inner step.
        steps: Inner step whose episode is shown; repeatable, to show several side by side. By default, first and last.
        size: Width and height of each panel in pixels, for MuJoCo environments.
        every: Number of steps between frames.
        renderer: Renderer for MuJoCo environments. auto: the first of egl, glfw and osmesa that works, or else flat
            shapes, which need no OpenGL.
        trust: Allow importing the modules that the run's settings name, now and later.
    """
    at, text = RunAt.of(run, iteration), size if isinstance(size, str) else "x".join(map(str, size))
    width, _, height = text.partition("x")
    if not (width.isdecimal() and height.isdecimal() and all(16 <= int(side) <= 4096 for side in (width, height))):
        raise UsageError(f"--size {text}: expected WIDTHxHEIGHT in pixels, each 16 to 4096, such as 480x360")
    if sum((best, worst, task is not None)) > 1:
        raise UsageError("--task, --best and --worst are mutually exclusive")
    agree(at.path, trust)
    drawn_by = choose_renderer(renderer)  # before MuJoCo is imported
    return late.film_run(
        at.path,
        -1 if at.iteration is None else at.iteration,
        Path(out),
        task="best" if best else "worst" if worst else task or 0,
        episode=episode,
        steps=tuple(steps) or None,
        size=(int(width), int(height)),
        every=every,
        renderer=drawn_by,
    )


@checked
def policy(
    run: LearnerArgument, iteration: Iteration = None, *, out: Path | str, trust: Trust = False
) -> "TrainedPolicy":
    """Write a trained policy to a file.

    The file can be used without the run. RUN@N is the policy after N updates, with which iteration N starts; RUN is the
    newest policy.

    Example: `metaloom policy first@2 --out first.safetensors`

    Args:
        run: Run that trained the policy.
        iteration: Number of updates of the policy, counted from the end if negative; the newest policy if None.
        out: New file: .safetensors for `metaloom.load_policy`; .onnx or .pt2 (torch.export) for other programs.
        trust: Allow importing the modules that the run's settings name, now and later.
    """
    at = RunAt.of(run, iteration, learner=True)
    agree(at.path, trust)
    found = late.policy_of(open_run(at.path), -1 if at.iteration is None else at.iteration)
    found.save(Path(out))
    return found

"""`video`: renders an episode before and after adaptation."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from metaloom.flows.arguments import checked
from metaloom.flows.errors import UsageError
from metaloom.flows.films.opengl import RendererName, choose_renderer
from metaloom.flows.operations import late
from metaloom.flows.operations.options import Iteration, Positive, PythonOnly, RunAtArgument, Trust, agree
from metaloom.flows.runs import RunAt

if TYPE_CHECKING:
    from metaloom.flows.films.video import Film


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

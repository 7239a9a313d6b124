"""`metaloom video`."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from metaloom.flows.cli.options import Flag, RunAtArgument, Trust, agree
from metaloom.flows.cli.output import console
from metaloom.flows.errors import FAILURE, UsageError
from metaloom.flows.films.opengl import RendererName, choose_renderer
from metaloom.flows.runs import RunAt


def video(
    run: RunAtArgument,
    *,
    out: Path,
    task: int | None = None,
    best: Flag = False,
    worst: Flag = False,
    episode: int | None = None,
    step: Annotated[tuple[int, ...], Parameter(negative=(), show_default=False)] = (),
    size: str = "480x360",
    every: int = 1,
    renderer: RendererName = "auto",
    trust: Trust = False,
) -> int:
    """Film an episode before and after adaptation.

    Both are shown side by side.

    The episode is simulated again from its seed and its stored actions. If an observation differs from the stored one
    by more than 1e-5, the command says so and exits with 1.

    Example: `metaloom video first@12 --best --out cheetah.gif`

    Args:
        out: File to write: .gif, .webp, .mp4 (needs `metaloom[video]`), or .png for the last picture alone.
        task: Place of the task in the iteration; 0 by default.
        best: The task with the highest mean return after adaptation.
        worst: The task with the lowest.
        episode: Place of the episode among those of its task; by default the one of median return, of each step.
        step: Inner step whose episode is shown; repeatable, side by side. By default the first and the last one.
        size: Width and height of each picture in pixels, for MuJoCo's robots.
        every: Show every so many steps only.
        renderer: What draws MuJoCo's robots. auto: the first of egl, glfw and osmesa that works, else flat shapes,
            which need no OpenGL.
    """
    at, (width, _, height) = RunAt.parse(run), size.partition("x")
    if not (width.isdecimal() and height.isdecimal() and all(16 <= int(side) <= 4096 for side in (width, height))):
        raise UsageError(f"found --size {size}; required WIDTHxHEIGHT in pixels, from 16 to 4096, such as 480x360")
    if sum((best, worst, task is not None)) > 1:
        raise UsageError("found several of --task, --best and --worst; leave all but one out")
    if every < 1:
        raise UsageError(f"found --every {every}; required 1 or more")
    agree(at.path, trust)
    drawn_by = choose_renderer(renderer)  # before MuJoCo is imported
    from metaloom.flows.films.video import video as film

    which = "best" if best else "worst" if worst else task or 0
    done = film(
        at.path,
        -1 if at.iteration is None else at.iteration,
        out,
        task=which,
        episode=episode,
        steps=step or None,
        size=(int(width), int(height)),
        every=every,
        renderer=drawn_by,
    )
    shown = ", ".join(f"{value:.2f} at step {k} (episode {done.episodes[k]})" for k, value in done.returns.items())
    console().print(f"{done.path}  {done.frames} frames, task {done.task}, return {shown}")
    console().print(done.agreement)
    return 0 if done.agrees else FAILURE

"""Videos of stored episodes, with episodes before and after adaptation side by side."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from metaloom import storage
from metaloom.flows.errors import ExtraMissing, UsageError
from metaloom.flows.films.opengl import RendererName
from metaloom.flows.films.painters import Painter, drawable, goal_of, painter_of, position_of
from metaloom.flows.formatting import plural
from metaloom.flows.graph.recomputed import Recomputed
from metaloom.flows.graph.run_stages import stages_of_run
from metaloom.flows.results.evaluation import EvaluationOutcome
from metaloom.flows.rollouts.workers import Backend
from metaloom.flows.runs import require_iteration
from metaloom.pipeline.config.run import RunConfig
from metaloom.pipeline.envs.answers import declared_facts
from metaloom.pipeline.envs.config import EnvConfig
from metaloom.pipeline.envs.contract import MetaEnv
from metaloom.pipeline.tasks.evaluation import EvaluationPlan
from metaloom.pipeline.types import Array, EpisodeBatch, TaskBatch
from metaloom.stages.evaluate import test_position
from metaloom.stages.rollouts.faults import RolloutPosition
from metaloom.storage import Run
from metaloom.storage.errors import system_errors
from metaloom.storage.unfinished import unfinished_folder

FORMATS = (".gif", ".webp", ".mp4", ".png")  # suffixes of video formats; .png contains only the last frame
_INK, _PAPER, _BAR = (30, 30, 30), (255, 255, 255), 26
_NARROWEST = 400  # minimum frame width in pixels, so that captions fit
WhichTask = int | Literal["best", "worst"]
AGREES = 1e-5  # maximum difference between simulated and stored observations in a faithful video


@dataclass(frozen=True)
class FramePanel:
    """Panel of a video frame: pixels, [height, width, 3] uint8, between two captions."""

    picture: Array
    above: str
    below: str


def check_film_file(out: Path, option: str = "--out") -> None:
    """Raise UsageError if a video cannot be written to this file."""
    if out.suffix.lower() not in FORMATS:
        raise UsageError(f"{option} {out}: the suffix must be one of {', '.join(FORMATS)}")
    if not out.absolute().parent.is_dir():
        raise UsageError(f"{option} {out}: the folder {out.absolute().parent} does not exist")
    if out.is_dir():
        raise UsageError(f"{option} {out} is a folder; give the path of a file")
    if out.suffix.lower() == ".mp4":
        _mp4_writer()


def write_film(frames: Iterable[Sequence[FramePanel]], out: Path, fps: float, caption: str) -> None:
    """Write frames to a video file atomically. All frames must have the same number of panels."""
    suffix, needed = out.suffix.lower(), "free space and permission to write a video"
    with (
        system_errors(out, required=needed, action="Free space, or choose another file"),
        unfinished_folder(out.absolute().parent, out.stem) as folder,
    ):
        unfinished = folder / f"film{suffix}"
        pictures = (compose(panels, caption) for panels in frames)
        if suffix == ".mp4":
            # All players support this pixel format.
            with _mp4_writer()(unfinished, fps=fps, codec="libx264", pixelformat="yuv420p", macro_block_size=2) as film:
                for picture in pictures:
                    film.append_data(np.asarray(picture))
        elif suffix == ".png":
            *_, last = pictures
            last.save(unfinished)
        else:
            _write_animation(pictures, unfinished, fps)
        unfinished.replace(out)


def compose(panels: Sequence[FramePanel], caption: str) -> Image.Image:
    """Return a frame with the caption at the top and the panels side by side below the caption."""
    # Enlarge pictures that are narrower than the captions.
    times = -(-_NARROWEST // sum(panel.picture.shape[1] for panel in panels))
    pictures = [panel.picture.repeat(times, axis=0).repeat(times, axis=1) for panel in panels]
    widths = [picture.shape[1] for picture in pictures]
    height = max(picture.shape[0] for picture in pictures)
    image = Image.new("RGB", (sum(widths) + 4 * (len(panels) - 1), height + 3 * _BAR), _PAPER)
    canvas, left = ImageDraw.Draw(image), 0
    _write(canvas, caption, 0, image.width, 0)
    for panel, picture, width in zip(panels, pictures, widths, strict=True):
        _write(canvas, panel.above, left, width, _BAR)
        image.paste(Image.fromarray(picture), (left, 2 * _BAR))
        _write(canvas, panel.below, left, width, 2 * _BAR + height)
        left += width + 4
    # Video codecs require an even width and height.
    return image.crop((0, 0, image.width + image.width % 2, image.height + image.height % 2))


def _write(canvas: ImageDraw.ImageDraw, text: str, left: int, width: int, top: int) -> None:
    """Draw a line of text centered in a bar, in the largest font that fits."""
    for size in (15, 13, 11, 9):
        font = ImageFont.load_default(size)
        if canvas.textlength(text, font=font) <= width - 8:
            break
    canvas.text((left + width / 2, top + _BAR / 2), text, fill=_INK, font=font, anchor="mm")


def _write_animation(pictures: Iterable[Image.Image], out: Path, fps: float) -> None:
    rest = iter(pictures)
    if out.suffix == ".gif":
        # Dithering would change pixels from frame to frame and triple the file size.
        few: dict[str, Any] = {"method": Image.Quantize.FASTOCTREE, "dither": Image.Dither.NONE}
        rest = (picture.quantize(128, **few) for picture in pictures)
    first = next(rest)
    # Both formats use whole milliseconds (GIF: tens).
    duration = round(1000 / fps)
    first.save(out, save_all=True, append_images=rest, duration=duration, loop=0, optimize=False)


def _mp4_writer() -> Any:
    try:
        import imageio_ffmpeg  # pyright: ignore[reportMissingImports]
        from imageio import get_writer  # pyright: ignore[reportMissingImports, reportUnknownVariableType]
    except ImportError:
        raise ExtraMissing("video", "imageio with imageio-ffmpeg") from None
    try:
        imageio_ffmpeg.get_ffmpeg_exe()  # pyright: ignore[reportUnknownMemberType]
    except RuntimeError:
        # The wheels of imageio-ffmpeg include ffmpeg for most machines.
        raise UsageError("an .mp4 needs ffmpeg, which is not installed. Install it, or write a .webp or .gif") from None
    return get_writer  # pyright: ignore[reportUnknownVariableType]


@dataclass(frozen=True)
class StoredEpisode:
    """Stored episode, with everything needed to simulate it again."""

    config: RunConfig
    position: RolloutPosition  # determines the seeds
    when: str  # label, such as "before adaptation"
    b: int  # index of the task in the batch `episodes`
    e: int  # index of the episode in the batch
    tasks: TaskBatch
    episodes: EpisodeBatch

    @property
    def length(self) -> int:
        return int(self.episodes.lengths[self.b, self.e])

    @property
    def rewards(self) -> Array:
        """Reward of each of the episode's steps, [T]."""
        return self.episodes.rewards[self.b, self.e, : self.length]

    def facts_text(self, env: MetaEnv, t: int) -> str:
        """Format the facts after t steps: the first success, and distances."""
        declared = {fact.name: fact.unit for fact in declared_facts(env)}
        facts = {name: values[self.b, self.e, :t] for name, values in self.episodes.facts.items() if values.ndim == 3}
        words = [f"success at step {1 + facts['success'].argmax()}"] if facts.get("success", np.zeros(0)).any() else []
        words += [f"{name.replace('_', ' ')} {facts[name][-1]:.2f} m" for name in facts if t and declared[name] == "m"]
        return "".join(f"{word}   " for word in words)

    def simulate(self, env: MetaEnv) -> Iterator[float]:
        """Repeat the episode's actions; yield the largest deviation of each observation from the stored one."""
        env.set_task(self.tasks.params[self.b])
        stored = self.episodes.observations[self.b, self.e]
        observation, _ = env.reset(seed=self.position.reset_seed(self.b, self.e, self.config.env.seed_bits))
        yield _difference(observation, stored[0])
        for t, action in enumerate(self.episodes.actions[self.b, self.e, : self.length]):
            yield _difference(env.step(action)[0], stored[t + 1])


def _difference(observation: Any, stored: Array) -> float:
    # Convert as the sampler does before it stores observations.
    found = np.asarray(observation, np.float64).ravel().astype(stored.dtype)
    if found.shape != stored.shape:
        return float("inf")
    return float(np.max(np.abs(found.astype(np.float64) - stored), initial=0.0))


@dataclass(frozen=True)
class Film:
    """Result of writing a video."""

    path: Path
    frames: int
    task: int
    episodes: Mapping[str, int]  # index within the task, keyed by label, such as "before adaptation"
    returns: Mapping[str, float]  # keyed by label
    largest_difference: float  # between a simulated observation and the stored one

    def __str__(self) -> str:
        returns = (f"{value:.2f} {when} (episode {self.episodes[when]})" for when, value in self.returns.items())
        return f"{self.path}  {self.frames} frames, task {self.task}, return {', '.join(returns)}\n{self.agreement}"

    @property
    def agrees(self) -> bool:
        """True if the simulated observations agree with the stored ones within the tolerance AGREES."""
        return self.largest_difference <= AGREES

    @property
    def agreement(self) -> str:
        """Sentence that states whether the simulated observations agree with the stored ones."""
        if self.agrees:
            return f"observations agree with the stored ones: largest difference {self.largest_difference:.1g}"
        return (
            f"observations differ from the stored ones by up to {self.largest_difference:.3g}: the video does not show "
            "what happened. The version of the simulator or the environment may differ; see `metaloom replay`"
        )


def video(
    path: Path,
    iteration: int,
    out: Path,
    *,
    task: WhichTask = 0,
    episode: int | None = None,
    steps: Sequence[int] | None = None,
    size: tuple[int, int] = (480, 360),
    every: int = 1,
    renderer: RendererName = "auto",
) -> Film:
    """Write a video of a task's stored episodes before and after adaptation, simulated again from seeds and actions."""
    check_film_file(out)
    run = storage.open_run(path)
    if iteration < 0:
        (iteration,) = run.select(iteration)
    require_iteration(run, iteration)
    recordings = _recordings(run, iteration, task, episode, steps)
    b, which = recordings[0].b, "median return" if episode is None else f"episode {episode}"
    caption = f"{run.name}, iteration {iteration}, task {b}{described(recordings[0].tasks, b)}, {which}"
    return film_of(recordings, out, caption, size=size, every=every, renderer=renderer)


def film_of(
    recordings: Sequence[StoredEpisode],
    out: Path,
    caption: str,
    *,
    size: tuple[int, int] = (480, 360),
    every: int = 1,
    renderer: RendererName = "auto",
) -> Film:
    """Write a video of episodes of the same task, side by side; other arguments are as in `video`."""
    with ExitStack() as stack:
        envs = [stack.enter_context(closing(drawable(recording.config.env))) for recording in recordings]
        # One camera for all panels, so that they can be compared.
        both = zip(recordings, envs, strict=True)
        way = np.array([now() for recording, env in both if (now := position_of(env)) for _ in recording.simulate(env)])
        # The environments are now at the end of their episodes, so a moving goal is at its final position.
        goals = [goal_of(env, way) if len(way) else None for env in envs]
        seen = np.array([*way, *(goal() for goal in goals if goal is not None)])
        panels, differences = list[Iterator[FramePanel]](), list[float]()
        for recording, env, goal in zip(recordings, envs, goals, strict=True):
            painter = stack.enter_context(closing(painter_of(env, size, renderer, seen if len(seen) else None, goal)))
            panels.append(_panels(recording, env, painter, every, differences))
        # Viewers slow down frames of less than 20 ms.
        fps = min(float(envs[0].metadata.get("render_fps") or 20) / every, 50.0)
        write_film(_frames(panels), out, fps, caption)
    # The first frame shows the reset, and the last one the last step.
    frames = 1 + max(-(-recording.length // every) for recording in recordings)
    returns = {recording.when: float(recording.rewards.sum(dtype=np.float64)) for recording in recordings}
    episodes = {recording.when: recording.e for recording in recordings}
    return Film(out, frames, recordings[0].b, episodes, returns, max(0.0, *differences))


def _panels(
    recording: StoredEpisode, env: MetaEnv, painter: Painter, every: int, differences: list[float]
) -> Iterator[FramePanel]:
    """Yield the panels of an episode; append its deviations from the stored observations to `differences`."""
    position_now, start, moved = position_of(env), None, ""
    sums = np.concatenate([[0.0], np.cumsum(recording.rewards, dtype=np.float64)])
    for t, difference in enumerate(recording.simulate(env)):
        differences.append(difference)
        if position_now is not None:
            position = position_now()
            start = position if start is None else start
            moved = f"x {round(position[0] - start[0], 1) + 0.0:+.1f} m   "  # adding 0.0 avoids -0.0
        if t % every == 0 or t == recording.length:
            below = f"step {t}   {moved}{recording.facts_text(env, t)}reward so far {sums[t]:.2f}"
            yield FramePanel(painter.draw(), f"{recording.when}: return {sums[-1]:.2f}", below)


def _frames(panels: Sequence[Iterator[FramePanel]]) -> Iterator[list[FramePanel]]:
    """Yield frames until the longest episode ends; shorter episodes keep their last frame."""
    shown: list[FramePanel | None] = [None] * len(panels)
    for together in zip_longest(*panels):
        shown = [new or old for new, old in zip(together, shown, strict=True)]
        yield [panel for panel in shown if panel is not None]


def _recordings(
    run: Run, iteration: int, task: WhichTask, episode: int | None, steps: Sequence[int] | None
) -> list[StoredEpisode]:
    name = run.stages.named("rollouts")
    refs = [ref for ref in run.refs() if ref.iteration == iteration and ref.stage == name]
    if not refs:
        raise storage.StageMissing(
            run.path,
            found=f"no episodes of iteration {iteration} are stored",
            required="an iteration with stored episodes",
            action=f"`metaloom show {storage.argument(run.path)}` lists what is stored",
        )
    stored = {ref.step: ref for ref in refs}
    chosen = [*dict.fromkeys((min(stored), max(stored)) if steps is None else steps)]
    for step in chosen:
        if step not in stored:
            raise UsageError(f"inner step {step} is not stored; choose one of {', '.join(map(str, stored))}")
    with stages_of_run(run, Backend(workers=0)) as stages:
        outputs = Recomputed(run, stages)
        tasks: TaskBatch = run[iteration].tasks()
        batches: dict[int, EpisodeBatch] = {k: outputs.load(stored[k]) for k in {*chosen, max(stored)}}
        b = _place(task, batches[max(stored)])
        recordings: list[StoredEpisode] = []
        for k in chosen:
            config, batch = stages.config(stored[k]), batches[k]
            shown = {median_episode(batch, b, episode): _when(k, bool(config.algorithm.adaptation_steps))}
            if episode is None and (num_episodes := config.algorithm.trial or 1) > 1:
                # A task's episodes are in this order: the first of each trial, then the second of each, and so on.
                of_trials = batch.rewards[b].sum(-1, dtype=np.float64).reshape(num_episodes, -1)
                trial = int(np.argsort(of_trials.sum(0), kind="stable")[(of_trials.shape[1] - 1) // 2])
                last = of_trials.size - of_trials.shape[1] + trial
                shown = {trial: "first episode of a trial", last: f"episode {num_episodes} of the trial"}
            position = RolloutPosition(config.seed, iteration, k)
            recordings += [StoredEpisode(config, position, when, b, e, tasks, batch) for e, when in shown.items()]
        return recordings


def _when(k: int, adapts: bool) -> str:
    if adapts:
        return f"after {plural(k, 'step')} of adaptation" if k else "before adaptation"
    return f"inner step {k}" if k else "episode"


def _place(task: WhichTask, after: EpisodeBatch) -> int:
    if isinstance(task, int):
        if not 0 <= task < len(after.lengths):
            raise UsageError(f"task must be an index from 0 to {len(after.lengths) - 1}, best or worst, got {task}")
        return task
    returns = np.nanmean(np.where(after.real, after.rewards.sum(-1, dtype=np.float64), np.nan), axis=1)
    return int(returns.argmax() if task == "best" else returns.argmin())


def median_episode(batch: EpisodeBatch, b: int, asked: int | None = None) -> int:
    """Return the index of the requested episode of a task or, by default, of the one with the (lower) median return."""
    episodes = int(batch.real[b].sum())
    if asked is None:
        returns = batch.rewards[b, :episodes].sum(-1, dtype=np.float64)
        return int(np.argsort(returns, kind="stable")[(episodes - 1) // 2])
    if not 0 <= asked < episodes:
        raise UsageError(f"task {b} has no episode {asked}; choose one from 0 to {episodes - 1}")
    return asked


def described(tasks: TaskBatch, b: int) -> str:
    """Format the parameters of a task; "" if there are none or more than six."""
    if not 0 < len(tasks.names) <= 6:
        return ""
    values = (f"{name} {value:.3g}" for name, value in zip(tasks.names, tasks.params[b], strict=True))
    return f" ({', '.join(values)})"


class EvaluationFilm:
    """Recorder of the test episodes before and after adaptation, which makes a video of one task.

    The video shows the task with the median return and its median-return episodes.
    """

    def __init__(self, out: Path, env: EnvConfig, renderer: RendererName = "auto") -> None:
        check_film_file(out, "--video")
        drawable(env).close()
        self._out = out
        self._renderer: RendererName = renderer
        self._kept: dict[int, EpisodeBatch] = {}

    def tested(self, k: int, episodes: EpisodeBatch) -> None:
        """Keep the test episodes before adaptation and after k steps; discard the others."""
        self._kept = {0: self._kept.get(0, episodes), k: episodes}

    def write(self, outcome: EvaluationOutcome, name: str) -> Film:
        """Write the video of an evaluation of the run `name`."""
        returns, config = outcome.evaluation.test_returns[:, -1].mean(axis=1), outcome.config
        b = int(np.argsort(returns, kind="stable")[(len(returns) - 1) // 2])
        run_seed = EvaluationPlan.of(config).run_seed
        recordings: list[StoredEpisode] = []
        for k, episodes in self._kept.items():
            when, e = _when(k, len(self._kept) > 1), median_episode(episodes, b)
            recordings.append(StoredEpisode(config, test_position(run_seed, k), when, b, e, outcome.tasks, episodes))
        title = f"{name} after {plural(outcome.updates, 'update')}, test task {b}{described(outcome.tasks, b)}"
        return film_of(recordings, self._out, f"{title}, median-return task and episodes", renderer=self._renderer)

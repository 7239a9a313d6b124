"""Film stored episodes, before and after adaptation side by side."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

import numpy as np

from metaloom import storage
from metaloom.flows.errors import UsageError
from metaloom.flows.films.film import Panel, check_film_file, write_film
from metaloom.flows.films.opengl import RendererName
from metaloom.flows.films.painters import Painter, drawable, painter_of, position_of
from metaloom.flows.graph.recomputed import Recomputed
from metaloom.flows.graph.run_stages import stages_of_run
from metaloom.flows.rollouts.workers import Backend
from metaloom.flows.runs import require_iteration
from metaloom.pipeline.config.run import RunConfig
from metaloom.pipeline.envs.contract import MetaEnv
from metaloom.pipeline.types import Array, EpisodeBatch, TaskBatch
from metaloom.stages.rollouts.faults import RolloutPosition
from metaloom.storage import Run

WhichTask = int | Literal["best", "worst"]
AGREES = 1e-5
"""Largest difference of an observation from the stored one up to which a film shows what happened."""


@dataclass(frozen=True)
class Recording:
    """A stored episode, and everything needed to simulate it again.

    Attributes:
        config: Settings under which it was sampled.
        position: Position at which its batch was sampled.
        b, e: Indices of its task and of the episode in the batch.
        tasks: Tasks of the iteration.
        episodes: The batch.
    """

    config: RunConfig
    position: RolloutPosition
    b: int
    e: int
    tasks: TaskBatch
    episodes: EpisodeBatch

    @property
    def length(self) -> int:
        """Steps in the episode."""
        return int(self.episodes.lengths[self.b, self.e])

    @property
    def rewards(self) -> Array:
        """Rewards of its real steps, [T]."""
        return self.episodes.rewards[self.b, self.e, : self.length]

    def simulate(self, env: MetaEnv) -> Iterator[float]:
        """Reset the environment and take the episode's steps.

        Yields:
            After the reset, and after every step: the largest difference of an observation from the stored one.
        """
        env.set_task(self.tasks.params[self.b])
        stored = self.episodes.observations[self.b, self.e]
        observation, _ = env.reset(seed=self.position.reset_seed(self.b, self.e, self.config.env.seed_bits))
        yield _difference(observation, stored[0])
        for t, action in enumerate(self.episodes.actions[self.b, self.e, : self.length]):
            yield _difference(env.step(action)[0], stored[t + 1])


def _difference(observation: Any, stored: Array) -> float:
    # As the sampler keeps them.
    found = np.asarray(observation, np.float64).ravel().astype(stored.dtype)
    if found.shape != stored.shape:
        return float("inf")
    return float(np.max(np.abs(found.astype(np.float64) - stored), initial=0.0))


@dataclass(frozen=True)
class Film:
    """A film that was written.

    Attributes:
        path: Path of the film.
        frames: Number of pictures.
        task: Index of its task in the iteration.
        episodes: Indices of the episodes within the task, by the inner step that they were sampled at.
        returns: Returns of the episodes, by the inner step that they were sampled at.
        largest_difference: Largest difference of any observation from the stored one.
    """

    path: Path
    frames: int
    task: int
    episodes: Mapping[int, int]
    returns: Mapping[int, float]
    largest_difference: float

    def __str__(self) -> str:
        returns = (f"{value:.2f} at step {k} (episode {self.episodes[k]})" for k, value in self.returns.items())
        return f"{self.path}  {self.frames} frames, task {self.task}, return {', '.join(returns)}\n{self.agreement}"

    @property
    def agrees(self) -> bool:
        """True if the simulated observations equal the stored ones."""
        return self.largest_difference <= AGREES

    @property
    def agreement(self) -> str:
        """Agreement with the stored observations, in words."""
        if self.agrees:
            return f"observations agree with the stored ones: largest difference {self.largest_difference:.1g}"
        return (
            f"observations differ from the stored ones by up to {self.largest_difference:.3g}: the film does not show "
            "what happened. Another version of the simulator or the environment causes this; see `metaloom replay`"
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
    """Film an episode of a stored iteration, simulated again from its seed and its stored actions."""
    check_film_file(out)
    run = storage.open_run(path)
    if iteration < 0:
        (iteration,) = run.select(iteration)
    require_iteration(run, iteration)
    recordings = _recordings(run, iteration, task, episode, steps)
    tasks, b = recordings[0].tasks, recordings[0].b
    which = "episodes of median return" if episode is None else f"episode {episode}"
    caption = f"{run.name}, iteration {iteration}, task {b}{described(tasks, b)}, {which}"
    return film_of(recordings, out, caption, size=size, every=every, renderer=renderer)


def film_of(
    recordings: Sequence[Recording],
    out: Path,
    caption: str,
    *,
    size: tuple[int, int] = (480, 360),
    every: int = 1,
    renderer: RendererName = "auto",
    adapts: bool | None = None,
) -> Film:
    """Film episodes of one task side by side; arguments as of `video`.

    `adapts` is True if their steps are adaptation steps; None for the behavior in training.
    """
    with ExitStack() as stack:
        panels = [_Panels(recording, stack, adapts=adapts) for recording in recordings]
        # One camera for all panels, so that they can be compared.
        way = np.concatenate([panel.way() for panel in panels])
        for panel in panels:
            panel.painter = painter_of(panel.env, size, renderer, way if len(way) else None)
            stack.callback(panel.painter.close)
        fps = min(panels[0].fps / every, 50.0)
        write_film(_frames(panels, every), out, fps, caption)
    # The first picture is of what reset returns, the last one always of the last step.
    frames = 1 + max(-(-recording.length // every) for recording in recordings)
    difference = max(panel.largest_difference for panel in panels)
    shown = {recording.position.step: recording for recording in recordings}
    returns = {k: float(recording.rewards.sum(dtype=np.float64)) for k, recording in shown.items()}
    episodes = {k: recording.e for k, recording in shown.items()}
    return Film(out, frames, recordings[0].b, episodes, returns, difference)


class _Panels:
    """The pictures of one episode."""

    painter: Painter

    def __init__(self, recording: Recording, stack: ExitStack, *, adapts: bool | None) -> None:
        self._recording = recording
        self._adapts = bool(recording.config.algorithm.adaptation_steps) if adapts is None else adapts
        self.env = drawable(recording.config.env)
        stack.callback(self.env.close)
        self._position = position_of(self.env)
        self.fps = float(self.env.metadata.get("render_fps") or 20)
        self.largest_difference = 0.0

    def way(self) -> Array:
        """Return the positions [n, 3] of a robot that moves about, in m; none for any other environment."""
        if self._position is None:
            return np.empty((0, 3))
        return np.array([self._position() for _ in self._recording.simulate(self.env)])

    def pictures(self, every: int) -> Iterator[Panel]:
        recording = self._recording
        sums = np.concatenate([[0.0], np.cumsum(recording.rewards, dtype=np.float64)])
        k = recording.position.step
        if self._adapts:
            when = f"after {k} step{'s' * (k > 1)} of adaptation" if k else "before adaptation"
        else:
            when = f"inner step {k}" if k else "episode"
        above = f"{when}: return {sums[-1]:.2f}"
        start, moved = None, ""
        for t, difference in enumerate(recording.simulate(self.env)):
            self.largest_difference = max(self.largest_difference, difference)
            if self._position is not None:
                position = self._position()
                start = position if start is None else start
                moved = f"{round(position[0] - start[0], 1) + 0.0:+.1f} m   "  # 0.0 lest it be -0.0
            if t % every == 0 or t == recording.length:
                yield Panel(self.painter.draw(), above, f"step {t}   {moved}reward so far {sums[t]:.2f}")


def _frames(panels: Sequence[_Panels], every: int) -> Iterator[list[Panel]]:
    """Yield frames as long as any of the episodes lasts; the others stand still at their end."""
    shown: list[Panel | None] = [None] * len(panels)
    for together in zip_longest(*(panel.pictures(every) for panel in panels)):
        shown = [new or old for new, old in zip(together, shown, strict=True)]
        yield [panel for panel in shown if panel is not None]


def _recordings(
    run: Run, iteration: int, task: WhichTask, episode: int | None, steps: Sequence[int] | None
) -> list[Recording]:
    name = run.stages.named("rollouts")
    refs = [ref for ref in run.refs() if ref.iteration == iteration and ref.stage == name]
    if not refs:
        raise storage.StageMissing(
            run.path,
            found=f"no episodes of iteration {iteration} are stored",
            required="an iteration that has sampled some",
            action=f"`metaloom show {storage.argument(run.path)}` lists what is stored",
        )
    stored = {ref.step: ref for ref in refs}
    chosen = [*dict.fromkeys((min(stored), max(stored)) if steps is None else steps)]
    for step in chosen:
        if step not in stored:
            raise UsageError(f"found inner step {step}; required one of those stored: {', '.join(map(str, stored))}")
    with stages_of_run(run, Backend(workers=0)) as stages:
        outputs = Recomputed(run, stages)
        tasks: TaskBatch = run[iteration].tasks()
        batches: dict[int, EpisodeBatch] = {k: outputs.load(stored[k]) for k in {*chosen, max(stored)}}
        b = _place(task, batches[max(stored)])
        return [
            Recording(
                config,
                RolloutPosition(config.seed, iteration, k),
                b,
                median_episode(batches[k], b, episode),
                tasks,
                batches[k],
            )
            for k, config in ((k, stages.config(stored[k])) for k in chosen)
        ]


def _place(task: WhichTask, after: EpisodeBatch) -> int:
    if isinstance(task, int):
        if not 0 <= task < len(after.lengths):
            raise UsageError(f"found task {task}; required one from 0 to {len(after.lengths) - 1}, best or worst")
        return task
    sums = np.where(after.real, after.rewards.sum(-1, dtype=np.float64), np.nan)
    returns = np.nanmean(sums, axis=1)
    return int(returns.argmax() if task == "best" else returns.argmin())


def median_episode(batch: EpisodeBatch, b: int, asked: int | None = None) -> int:
    """Return the requested episode of a task, or the one of median return, the lower of two."""
    episodes = int(batch.real[b].sum())
    if asked is None:
        returns = batch.rewards[b, :episodes].sum(-1, dtype=np.float64)
        return int(np.argsort(returns, kind="stable")[(episodes - 1) // 2])
    if not 0 <= asked < episodes:
        raise UsageError(f"found episode {asked} of task {b}; required one from 0 to {episodes - 1}")
    return asked


def described(tasks: TaskBatch, b: int) -> str:
    """Return the parameters of a task, if it has few."""
    if not 0 < len(tasks.names) <= 6:
        return ""
    values = (f"{name} {value:.3g}" for name, value in zip(tasks.names, tasks.params[b], strict=True))
    return f" ({', '.join(values)})"

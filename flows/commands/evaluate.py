"""Videos of an evaluation's test episodes, which are not stored."""

from pathlib import Path

import numpy as np

from metaloom.flows.films.opengl import RendererName
from metaloom.flows.films.painters import drawable
from metaloom.flows.films.video import Film, Recording, check_film_file, described, film_of, median_episode
from metaloom.flows.formatting import plural
from metaloom.flows.results.evaluation import EvaluationOutcome
from metaloom.pipeline.envs.config import EnvConfig
from metaloom.pipeline.tasks.evaluation import EvaluationPlan
from metaloom.pipeline.types import EpisodeBatch
from metaloom.stages.evaluate import test_position


class EvaluationFilm:
    """Keeps the test episodes before the first and after the last adaptation step, and films one task.

    It films the task and the episodes of median return.

    Args:
        out: File to write: .gif, .webp, .mp4, or .png for only the last frame.
        env: Environment to film.
        renderer: Renderer for MuJoCo's robots.
    """

    def __init__(self, out: Path, env: EnvConfig, renderer: RendererName = "auto") -> None:
        check_film_file(out, "--video")
        drawable(env).close()
        self._out = out
        self._renderer: RendererName = renderer
        self._kept: dict[int, EpisodeBatch] = {}

    def tested(self, k: int, episodes: EpisodeBatch) -> None:
        """Keep the test episodes before adaptation and after k steps; drop the others."""
        self._kept = {0: self._kept.get(0, episodes), k: episodes}

    def write(self, outcome: EvaluationOutcome, name: str) -> Film:
        """Write the video of the evaluation of the run `name`."""
        returns, config = outcome.evaluation.test_returns[:, -1].mean(axis=1), outcome.config
        b = int(np.argsort(returns, kind="stable")[(len(returns) - 1) // 2])
        run_seed = EvaluationPlan.of(config).run_seed
        recordings = [
            Recording(config, test_position(run_seed, k), b, median_episode(episodes, b), outcome.tasks, episodes)
            for k, episodes in self._kept.items()
        ]
        caption = (
            f"{name} after {plural(outcome.updates, 'update')}, test task {b}{described(outcome.tasks, b)}, "
            "task and episodes of median return"
        )
        return film_of(recordings, self._out, caption, renderer=self._renderer, adapts=len(recordings) > 1)

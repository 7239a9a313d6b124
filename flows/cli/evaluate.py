"""`metaloom evaluate`."""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from metaloom.flows.cli.options import ANYWHERE, AsJson, BackendOptions, LearnerArgument, Trust, agree
from metaloom.flows.cli.output import answer, say
from metaloom.flows.errors import FAILURE
from metaloom.flows.runs import RunAt
from metaloom.flows.views.status import STATUS

if TYPE_CHECKING:
    from metaloom.flows.commands.evaluation_film import EvaluationFilm


def evaluate(
    run: LearnerArgument,
    *,
    tasks: str | None = None,
    num_tasks: int | None = None,
    evenly_by: str | None = None,
    task_sampling: Literal["uniform", "balanced"] | None = None,
    adaptation_steps: int | None = None,
    episodes: int | None = None,
    test_episodes: int | None = None,
    deterministic: bool | None = None,
    remembered: Literal["as-tested", "drawn"] | None = None,
    seed: int | None = None,
    plot: Path | None = None,
    video: Path | None = None,
    trust: Trust = False,
    where: BackendOptions = ANYWHERE,
    as_json: AsJson = False,
) -> int:
    """Measure a stored learner on fresh episodes.

    It adapts the learner to tasks and reports its return after each adaptation step.

    Options that are not given come from the run's `evaluation` settings, or else are those of training.

    Example: `metaloom evaluate first@10 --num-tasks 20 --adaptation-steps 3 --test-episodes 10 --plot curve.png`

    Args:
        tasks: `held-out`: tasks that training never drew; `train`: from its fixed set, or those of the last
            iteration; or a JSON, YAML or Parquet file of tasks.
        num_tasks: Tasks to draw; by default every test task or task of the file once, otherwise, also from a fixed
            training set, as many as an iteration of training has.
        evenly_by: Draw evenly from the classes of a fixed set: the task field that tells them apart.
        task_sampling: `balanced`: equally many tasks of every class that the environment declares, such as directions.
        adaptation_steps: Largest number of inner steps; returns are reported after each, from 0 on.
        episodes: Episodes per task that every adaptation step learns from.
        test_episodes: Episodes per task that measure the return after each step; no step learns from them.
        deterministic: Take the most likely action in test episodes.
        remembered: Of a policy with a memory, with `--deterministic`: `as-tested`, it remembers episodes of the most
            likely actions, so that returns are those of a trial; `drawn`: of actions that were drawn.
        seed: Decides which tasks and episodes are drawn.
        plot: Plot return against adaptation episodes into this .png, .svg or .pdf file.
        video: Film test episodes before and after adaptation into this .gif, .webp or .mp4 file (.png: the last picture
            alone): of the task of median return, its episodes of median return.
    """
    at, backend = RunAt.parse(run, learner=True), where.backend()
    if plot is not None:
        from metaloom.flows.views.evaluation_plots import check_plot_file

        check_plot_file(plot)
    agree(at.path, trust)
    film = None if video is None else _film(video, at.path)
    from metaloom.flows.commands.evaluate import evaluate as evaluate_run
    from metaloom.flows.formatting import plural
    from metaloom.flows.views.tables import evaluation_info, evaluation_view
    from metaloom.pipeline.types import EpisodeBatch
    from metaloom.stages.evaluate import unseen

    def tested(k: int, episodes: EpisodeBatch) -> None:
        STATUS.far(f"tested after {plural(k, 'step')}")
        (unseen if film is None else film.tested)(k, episodes)

    outcome = evaluate_run(
        at.path,
        at.iteration,
        tasks=tasks,
        num_tasks=num_tasks,
        evenly_by=evenly_by,
        task_sampling=task_sampling,
        adaptation_steps=adaptation_steps,
        episodes=episodes,
        test_episodes=test_episodes,
        deterministic=deterministic,
        remembered=remembered,
        seed=seed,
        backend=backend,
        tested=tested,
    )
    # First, since a full disk may keep pictures from being written.
    answer(as_json, lambda: evaluation_info(outcome), lambda: evaluation_view(outcome))
    if plot is not None:
        from metaloom.flows.views.evaluation_plots import per_shot_curve, write_plot

        title = f"{at.path.name} after {plural(outcome.updates, 'update')}"
        write_plot(plot, per_shot_curve(title, outcome.evaluation))
    if film is None:
        return 0
    done = film.write(outcome, at.path.name)
    shown = ", ".join(f"{value:.2f} after {plural(k, 'step')}" for k, value in done.returns.items())
    say(as_json, f"{done.path}  {done.frames} frames, task {done.task}, return {shown}\n{done.agreement}")
    return 0 if done.agrees else FAILURE


def _film(out: Path, run: Path) -> "EvaluationFilm":
    from metaloom.flows.films.opengl import choose_renderer

    renderer = choose_renderer("auto")  # before MuJoCo is imported
    from metaloom.flows.commands.evaluation_film import EvaluationFilm
    from metaloom.flows.graph.run_stages import config_of
    from metaloom.storage import open_run

    return EvaluationFilm(out, config_of(open_run(run)).env, renderer)

"""`metaloom evaluate`."""

from pathlib import Path
from typing import Literal

from metaloom.flows.cli.options import ANYWHERE, AsJson, BackendOptions, LearnerArgument, Trust, agree
from metaloom.flows.cli.output import answer
from metaloom.flows.runs import RunAt


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
    seed: int | None = None,
    plot: Path | None = None,
    trust: Trust = False,
    where: BackendOptions = ANYWHERE,
    as_json: AsJson = False,
) -> int:
    """Adapt a stored learner to tasks and report its return on fresh test episodes after each adaptation step.

    Options that are not given come from the run's `evaluation` settings, or else are those of training.

    Example: `metaloom evaluate first@10 --num-tasks 20 --adaptation-steps 3 --test-episodes 10 --plot curve.png`

    Args:
        tasks: `held-out`: tasks that training never drew; `train`: from its fixed set, or those of the last
            iteration; or a JSON, YAML or Parquet file of tasks.
        num_tasks: Tasks to draw; by default every test task or task of the file once, otherwise as many as in training.
        evenly_by: Draw evenly from the classes of a fixed set: the task field that tells them apart.
        task_sampling: `balanced`: equally many tasks of every class that the environment declares, such as directions.
        adaptation_steps: Largest number of inner steps; returns are reported after each, from 0 on.
        episodes: Episodes per task that every adaptation step learns from.
        test_episodes: Episodes per task that measure the return after each step; no step learns from them.
        deterministic: Take the most likely action in test episodes.
        seed: Decides which tasks and episodes are drawn.
        plot: Plot return against adaptation episodes into this .png or .svg file.
    """
    at, backend = RunAt.parse(run), where.backend()
    if plot is not None:
        from metaloom.flows.views.evaluation_plots import check_plot_file

        check_plot_file(plot)
    agree(at.path, trust)
    from metaloom.flows.commands.evaluate import evaluate as evaluate_run
    from metaloom.flows.views.tables import evaluation_info, evaluation_view

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
        seed=seed,
        backend=backend,
    )
    if plot is not None:
        from metaloom.flows.views.evaluation_plots import per_shot_curve, write_plot
        from metaloom.flows.views.formatting import plural

        title = f"{at.path.name} after {plural(outcome.updates, 'update')}"
        write_plot(plot, per_shot_curve(title, outcome.evaluation))
    answer(as_json, lambda: evaluation_info(outcome), lambda: evaluation_view(outcome))
    return 0

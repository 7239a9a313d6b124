"""`evaluate`: measures a stored learner's returns after each adaptation step."""

from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from metaloom import storage
from metaloom.flows.arguments import checked
from metaloom.flows.formatting import plural
from metaloom.flows.operations import late
from metaloom.flows.operations.options import (
    InProcess,
    Iteration,
    LearnerArgument,
    Natural,
    Positive,
    PythonOnly,
    Trust,
    agree,
)
from metaloom.flows.rollouts.backend import IN_PROCESS
from metaloom.flows.runs import RunAt, check_seed, learner_after, updates_at

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from metaloom.flows.results.evaluation import EvaluationOutcome


@checked
def evaluate(
    run: LearnerArgument,
    iteration: Iteration = None,
    *,
    tasks: str | Annotated[Sequence[Sequence[float]], PythonOnly] | None = None,
    num_tasks: Positive | None = None,
    evenly_by: str | None = None,
    task_sampling: Literal["uniform", "balanced"] | None = None,
    adaptation_steps: Natural | None = None,
    episodes: Positive | None = None,
    test_episodes: Positive | None = None,
    deterministic: bool | None = None,
    remembered: Literal["as-tested", "drawn"] | None = None,
    seed: Natural | None = None,
    trust: Trust = False,
    backend: InProcess = IN_PROCESS,
    tested: Annotated[Callable[[int, Any], None] | None, PythonOnly] = None,
) -> "EvaluationOutcome":
    """Evaluate a stored learner on new episodes.

    The learner is adapted to tasks, and its return is reported after each adaptation step. Options default to the run's
    `evaluation` settings, or else to its training settings.

    Example: `metaloom evaluate first@10 --num-tasks 20 --adaptation-steps 3 --test-episodes 10 --plot curve.png`

    Args:
        run: Run, or RUN@N for the learner after N updates.
        iteration: Number of updates of the learner, counted from the end if negative; the newest learner if None.
        tasks: `held-out`: tasks that training never drew; `train`: tasks from the fixed training set or the last
            training iteration; or a JSON, YAML or Parquet file of tasks.
        num_tasks: Number of tasks to draw. By default, held-out tasks and tasks from a file are each used once; for
            training tasks and distributions, the default is the number of tasks per training iteration.
        evenly_by: Draw evenly from the classes that this task field defines in a fixed set.
        task_sampling: `balanced` draws equally many tasks from each class that the environment declares, such as a
            direction.
        adaptation_steps: Maximum number of inner steps; returns are reported after each, starting with 0.
        episodes: Episodes per task that each adaptation step learns from.
        test_episodes: Episodes per task that measure the return after each step; they are not used for adaptation.
        deterministic: Take the most likely action in test episodes.
        remembered: With `--deterministic`, actions in the episodes that a policy with memory remembers: `as-tested` for
            the most likely actions, so that returns match a trial; `drawn` for sampled actions.
        seed: Seed for drawing tasks and sampling episodes.
        trust: Allow importing the modules that the run's settings name, now and later.
        backend: Rollout backend.
        tested: Called with each number of adaptation steps and the test episodes after it.

    Raises:
        UsageError, ConfigError, EnvError: The options are invalid or incompatible with the run.
    """
    at = RunAt.of(run, iteration, learner=True)
    agree(at.path, trust)
    stored = storage.open_run(at.path)
    updates = updates_at(stored, at.iteration)
    learner = learner_after(stored, updates)
    asked = dict[str, Any](tasks=tasks, num_tasks=num_tasks, evenly_by=evenly_by, task_sampling=task_sampling)
    asked |= dict(adaptation_steps=adaptation_steps, episodes=episodes, test_episodes=test_episodes)
    asked |= dict(deterministic=deterministic, remembered=remembered, seed=None if seed is None else check_seed(seed))
    trained = late.config_of(stored, stored.learner_ref(updates))
    if isinstance(tasks, str) and tasks not in ("held-out", "train"):
        with closing(late.make_env(trained.env)) as env:
            asked["tasks"] = late.load_tasks(Path(tasks), env.task_fields)
    elif tasks is not None and not isinstance(tasks, str):
        asked["tasks"] = [list(map(float, task)) for task in tasks]
    given = {name: value for name, value in asked.items() if value is not None}
    section = {**trained.evaluation.model_dump(mode="json"), **given, "every": None}
    config = late.build_config({**trained.model_dump(mode="json"), "evaluation": section})
    with late.stages_of(config, backend, partial(late.check_sizes, config, evaluation_alone=True)) as stages:
        late.require_stored_sizes(stored, stages.learner)
        late.warn_changed_sources(stored, stored.learner_ref(updates), late.plugin_sources(trained))
        outcome = stages.evaluate(learner, updates, tested or late.untested)
        env = stages.env
        new, drawn_from = late.tasks_are_new(config, env), late.tasks_drawn_from(config, env, updates)
        if new and stored.info.get("ancestors"):
            # Outputs shared with a fork's parent were computed under the parent's settings.
            drawn = (stored[i].tasks().params.tolist() for i in range(updates))
            new = {*map(tuple, outcome.task_params.tolist())}.isdisjoint(map(tuple, chain.from_iterable(drawn)))
        return late.EvaluationOutcome(stored.name, updates, config, outcome, new, drawn_from, env.task_classes, _draw)


def _draw(found: "EvaluationOutcome") -> "Figure":
    title = f"{found.run} after {plural(found.updates, 'update')}"
    return late.draw(late.per_shot_chart(title, found.evaluation))

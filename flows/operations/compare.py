"""Operations that evaluate learners, compare groups of runs, and find the first difference of two runs."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from metaloom import storage
from metaloom.flows.arguments import checked
from metaloom.flows.formatting import dotted, plural
from metaloom.flows.operations import late
from metaloom.flows.operations.options import (
    InProcess,
    Iteration,
    LearnerArgument,
    Natural,
    Positive,
    PythonOnly,
    RunArgument,
    RunsArgument,
    Trust,
    agree,
)
from metaloom.flows.results.replay import ArrayDifference, Difference, RunDiff
from metaloom.flows.rollouts.backend import IN_PROCESS
from metaloom.flows.runs import RunAt, RunLike, check_seed, folder_of, learner_after, updates_at
from metaloom.storage import Run
from metaloom.storage.format.codec import flatten

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from metaloom.flows.results.comparison import Comparison
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


@checked
def compare(
    runs: RunsArgument,
    *,
    metric: str | None = None,
    group: Sequence[str] = (),
    last: Positive = 10,
    mixed: bool = False,
    seed: int = 0,
) -> "Comparison":
    """Compare groups of runs, with intervals over seeds.

    Runs in a group differ only in their seed. The result has an interquartile mean per group. For each pair of groups,
    it states whether one is significantly higher or there are too few seeds to tell. Runs are compared at the largest
    number of environment steps that all of them have reached.

    Example: `metaloom compare first second --metric return --plot comparison.png`

    Args:
        runs: A run, a pattern, a sweep, or several of these.
        metric: `evaluation`: the return on held-out tasks after the last adaptation step, the default if all runs have
            stored evaluations; `return`: the training return after adaptation; or the name of any metric.
        group: Group by this setting only, ignoring other differences: `--group algorithm.inner_lr`. Repeatable.
        last: Number of final iterations over which `return` and other metrics are averaged.
        mixed: Compare runs even if their environments or evaluations differ.
        seed: Seed of the bootstrap.

    Raises:
        UsageError: The runs cannot be compared.
        storage.StoreError: One of them cannot be read.
    """
    named = [runs] if isinstance(runs, RunLike) else [*runs]
    return late.compare_runs(late.runs_named(named), metric=metric, group=group, last=last, mixed=mixed, seed=seed)


@checked
def diff(run_a: RunArgument, run_b: RunArgument) -> RunDiff:
    """Find the first output in which two runs differ.

    It also compares settings, code and packages. Exit code 0 if settings and outputs are equal, 1 if they differ.

    Example: `metaloom diff first second`

    Args:
        run_a: First run.
        run_b: Second run.
    """
    path_a, path_b = folder_of(run_a), folder_of(run_b)
    a, b = storage.open_run(path_a), storage.open_run(path_b)
    refs_a, refs_b = set(a.refs()), set(b.refs())
    shared = a.stages.sort(refs_a & refs_b)
    different = [ref for ref in shared if a.record(ref).digest != b.record(ref).digest]
    first = different[0] if different else None
    arrays: Iterable[ArrayDifference] = ()
    if first:
        try:
            arrays = late.compare_arrays(first, flatten(a.load(first)), flatten(b.load(first)))
        except storage.StageThinned:  # the records still show which arrays differ
            arrays = late.compare_digests(first, a.record(first).arrays, b.record(first).arrays)
    return RunDiff(
        a=path_a,
        b=path_b,
        settings=tuple(_differences(late.settings_of(a), late.settings_of(b))),
        environment=tuple(_differences(_environment(a), _environment(b))),
        first=first,
        arrays=tuple(arrays),
        compared=len(shared),
        different=len(different),
        only_a=len(refs_a - refs_b),
        only_b=len(refs_b - refs_a),
    )


def _environment(run: Run) -> dict[str, str]:
    facts = dict(dotted({name: run.info[name] for name in ("environment", "versions", "system")}))
    # Up to version 0.1, `pipeline` was a top-level package.
    place = facts.get("environment.env.class", "")
    return facts | ({"environment.env.class": f"metaloom.{place}"} if place.startswith("pipeline.") else {})


def _differences(a: Mapping[str, str], b: Mapping[str, str]) -> Iterator[Difference]:
    for name in sorted({*a, *b}):
        if a.get(name) != b.get(name):
            yield Difference(name, a.get(name), b.get(name))

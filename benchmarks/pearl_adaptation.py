"""Test tasks before and after a stored PEARL learner infers them: returns, reward terms, a picture.

    python benchmarks/pearl_adaptation.py RUN [--at UPDATES] [--out PNG] [--context-episodes N] [--tasks N]

A row for each number of context episodes, from none to N: means over test tasks, with their standard errors, of the
return and of every reward term summed over an episode; then what inference gained, task by task. RUN is a name under
the runs folder or a path. `--at` adds an earlier learner, and what the later one gained on it. The picture, for points
in the plane, has the test episodes by the prior and those after N context episodes: dots are starts, stars are goals.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from metaloom import storage
from metaloom.flows.errors import exit_code
from metaloom.flows.graph.run_stages import config_of
from metaloom.flows.operations.evaluate import evaluate
from metaloom.flows.results.evaluation import EvaluationOutcome
from metaloom.flows.runs import run_folder
from metaloom.flows.views import charts
from metaloom.flows.views.charts import INK, check_plot_file, write_plot
from metaloom.flows.views.series import AFTER, BEFORE, BETWEEN
from metaloom.pipeline.algorithms.pearl.settings import PEARL
from metaloom.pipeline.config.run import RunConfig
from metaloom.pipeline.envs.registry import make_env
from metaloom.pipeline.shown import printable
from metaloom.pipeline.types import Array, EpisodeBatch

GOAL = ("goal_x", "goal_y")
COLORS = (AFTER, BEFORE, *BETWEEN)
OTHER_TASKS = "#d0d4d9"


@dataclass(frozen=True)
class Measured:
    """A learner's evaluation.

    Attributes:
        outcome: the returns.
        tests: the test episodes after 0 ... N context episodes.
    """

    outcome: EvaluationOutcome
    tests: Sequence[EpisodeBatch]

    def columns(self, k: int) -> dict[str, Array]:
        """[B, E] each: the return of the test episodes after k context episodes, and their summed reward terms."""
        terms = {name: term.sum(axis=2, dtype=np.float64) for name, term in self.tests[k].reward_terms.items()}
        return {"return": self.outcome.evaluation.test_returns[:, k], **terms}

    def belief(self, k: int) -> str:
        """Return what the test episodes after k context episodes act by."""
        first_inference = cast(PEARL, self.outcome.config.algorithm).num_exp_traj_eval
        return "posterior" if k >= first_inference else "prior"


def main() -> None:
    args = _arguments()
    try:
        _tell(run_folder(args.run), args)
    except Exception as error:
        if exit_code(error) is None:
            raise
        raise SystemExit(f"{Path(__file__).name}: {printable(error)}") from None


def _tell(run: Path, args: argparse.Namespace) -> None:
    _check(config_of(storage.open_run(run)), args)
    latest = measure(run, None, args.context_episodes, args.tasks)
    earlier = [] if args.at is None else [measure(run, args.at, args.context_episodes, args.tasks)]
    learners = [*earlier, latest]
    for line in (*table(learners), *gains(learners)):
        print(line)
    if args.out is not None:
        write_plot(args.out, picture(f"{run.name} after {latest.outcome.updates} updates", latest))


def measure(run: Path, updates: int | None, context_episodes: int | None, tasks: int | None) -> Measured:
    """The run's evaluation of the learner that it had after so many updates, by one context episode after another."""
    tests: list[EpisodeBatch] = []
    outcome = evaluate(
        run,
        updates,
        num_tasks=tasks,
        adaptation_steps=context_episodes,
        episodes=1,
        tested=lambda k, episodes: tests.append(episodes),
    )
    return Measured(outcome, tests)


def table(learners: Sequence[Measured]) -> list[str]:
    """One markdown row per learner and number of context episodes."""
    names = list(learners[0].columns(0))
    rows = [f"| updates | context episodes | acts by | {' | '.join(names)} |", "| --- " * (3 + len(names)) + "|"]
    for learner in learners:
        for k in range(len(learner.tests)):
            means = [_mean(values) for values in learner.columns(k).values()]
            rows.append(f"| {learner.outcome.updates} | {k} | {learner.belief(k)} | {' | '.join(means)} |")
    return rows


def gains(learners: Sequence[Measured]) -> list[str]:
    """Compare each learner with and without inference, and the last learner with the first after all context."""
    last = len(learners[0].tests) - 1
    after = [learner.columns(last) for learner in learners]
    told = [
        f"after {learner.outcome.updates} updates, {last} context episodes against none: "
        + _differences(columns, learner.columns(0))
        for learner, columns in zip(learners, after, strict=True)
    ]
    if len(learners) > 1:
        first, *_, latest = (learner.outcome.updates for learner in learners)
        told.append(f"{latest} updates against {first}, {last} context episodes: {_differences(after[-1], after[0])}")
    tasks, _, episodes = learners[0].outcome.evaluation.test_returns.shape
    return [*told, f"{tasks} test tasks, {episodes} test episodes of each; mean ± standard error over tasks"]


def picture(title: str, learner: Measured) -> Figure:
    """Plot where the point went, by the prior and after the most context; some tasks in colours, the others in grey."""
    goals, last = learner.outcome.tasks.params, len(learner.tests) - 1
    figure = Figure(figsize=(9.2, 4.9), layout="constrained")
    panels = figure.subplots(1, 2, sharex=True, sharey=True)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold", color=INK, parse_math=False)
    for axes, k in zip(panels, (0, last), strict=True):
        charts.style(axes)
        told = "by the prior" if k == 0 else f"after {k} context episode{'s' if k > 1 else ''}"
        axes.set_title(f"{told}: return {_mean(learner.columns(k)['return'])}", loc="left", fontsize=10, color=INK)
        axes.set(aspect="equal", xlabel="x / m", ylabel="y / m")
        # Grey first, so that it covers nothing.
        for b in reversed(range(len(goals))):
            _draw_task(axes, learner.tests[k], b, goals[b])
    return figure


def _draw_task(axes: Axes, episodes: EpisodeBatch, b: int, goal: Array) -> None:
    colored = b < len(COLORS)
    color, width = (COLORS[b], 1.4) if colored else (OTHER_TASKS, 0.8)
    for e, length in enumerate(episodes.lengths[b]):
        path = episodes.observations[b, e, : length + 1]
        axes.plot(*path.T, color=color, linewidth=width, marker="o", markevery=[0], markersize=2 * width)
    axes.plot(
        *goal, color=color, marker="*", markersize=13 if colored else 8, markeredgecolor=INK if colored else color
    )


def _differences(values: dict[str, Array], others: dict[str, Array]) -> str:
    """Differences of columns task by task."""
    return ", ".join(f"{name} {_mean(values[name] - others[name])}" for name in values)


def _mean(values: Array) -> str:
    """Mean over tasks of the mean of their episodes [B, E], with its standard error where there are several tasks."""
    by_task = values.mean(axis=1)
    if len(by_task) == 1:
        return f"{by_task[0]:.2f}"
    return f"{by_task.mean():.2f} ± {by_task.std(ddof=1) / np.sqrt(len(by_task)):.2f}"


def _check(config: RunConfig, args: argparse.Namespace) -> None:
    """Say before episodes are collected what cannot be measured or drawn."""
    if config.algorithm.graph != "task_inference":
        raise SystemExit(f"{args.run}: {config.algorithm.name} does not infer tasks; pass a run of pearl")
    if args.out is None:
        return
    check_plot_file(args.out)
    env = make_env(config.env)
    fields, shape = tuple(field.name for field in env.task_fields), env.observation_space.shape
    if fields != GOAL or shape != (2,):
        raise SystemExit(
            f"--out: got observations of shape {shape} and tasks {fields} in {config.env.name}; expected positions "
            f"(2,) and tasks {GOAL} to draw paths. Leave --out out, or take a point robot"
        )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN", help="a name under the runs folder, or a path")
    parser.add_argument("--at", type=int, help="also the learner that the run had after so many updates")
    parser.add_argument("--out", type=Path, help="picture of the paths, .png or .svg")
    parser.add_argument(
        "--context-episodes", type=int, help="N; as in the run's evaluations when left out: 2 in most recipes"
    )
    parser.add_argument(
        "--tasks",
        type=int,
        help="test tasks to draw; when left out as in the run's evaluations: every test task, in order",
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()

"""How a stored learner adapts to tasks that training never drew."""

from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

import storage
from flows.errors import UsageError
from flows.on_policy import OnPolicyStages, acting_params
from flows.train import config_of, stages_of
from flows.workers import Backend
from pipeline.config import RunConfig
from pipeline.seeding import seed_for
from pipeline.types import EpisodeBatch, LearnerState, Step, TaskBatch, Update
from stages.adapt import adapt
from stages.collect_rollouts import RolloutPosition
from stages.process_samples import process_samples
from stages.sample_tasks import sample_tasks


@dataclass(frozen=True)
class Evaluation:
    """Returns on fresh tasks after 0 ... K adaptation steps.

    Attributes:
        tasks: the tasks that were drawn.
        rounds: one batch of episodes per number of adaptation steps; each is fresh, so what a policy adapted to never
            judges it.
    """

    iteration: int
    tasks: TaskBatch
    rounds: tuple[EpisodeBatch, ...]

    @property
    def env_steps(self) -> int:
        """Environment steps that the evaluation took; training does not count them."""
        return sum(episodes.num_steps for episodes in self.rounds)

    def table(self) -> pa.Table:
        """One row per adaptation step and task: mean and standard deviation of the episode returns, task fields."""
        rows = [
            {
                "adaptation_steps": k,
                "task": b,
                "average_return": float(returns.mean()),
                "std_return": float(returns.std()),
                "num_episodes": len(returns),
                **dict(zip(self.tasks.names, self.tasks.params[b].tolist(), strict=True)),
            }
            for k, episodes in enumerate(self.rounds)
            for b, returns in enumerate(episodes.episode_returns)
        ]
        return pa.Table.from_pylist(rows)

    def summary(self) -> list["AdaptationSummary"]:
        """The mean over tasks for every number of adaptation steps."""
        return [AdaptationSummary.of(k, episodes) for k, episodes in enumerate(self.rounds)]


@dataclass(frozen=True)
class AdaptationSummary:
    """Return after k adaptation steps: mean over tasks and the quartiles of the tasks' means."""

    adaptation_steps: int
    average_return: float
    lower_quartile: float
    upper_quartile: float

    @classmethod
    def of(cls, k: int, episodes: EpisodeBatch) -> "AdaptationSummary":
        """Summarise one round."""
        by_task = episodes.episode_returns.mean(axis=1)
        lower, upper = np.quantile(by_task, [0.25, 0.75])
        return cls(k, float(by_task.mean()), float(lower), float(upper))

    def as_dict(self) -> dict[str, float]:
        """The fields by name."""
        return asdict(self)


def evaluate(
    path: Path,
    iteration: int | None = None,
    *,
    num_tasks: int | None = None,
    adaptation_steps: int | None = None,
    seed: int = 0,
    backend: Backend = Backend(workers=0),
) -> Evaluation:
    """Adapt the learner that a run had after `iteration` updates to fresh tasks.

    Args:
        path: the run's folder.
        iteration: updates the learner has had; all of them when None.
        num_tasks: tasks to draw; as in training when None.
        adaptation_steps: inner steps; as in training when None.
        seed: which fresh tasks; independent of every seed of training.
        backend: where rollouts run.

    Raises:
        UsageError: a seed or a number of steps that no evaluation can have.
        storage.StageMissing: the run has had fewer updates.
    """
    if not 0 <= seed < 2**63:
        raise UsageError(f"found seed {seed}; required one from 0 to 2**63 - 1")
    run = storage.open_run(path)
    config = config_of(run)
    iteration = len(run.iterations) if iteration is None else iteration
    if not run.contains(storage.learner_ref(iteration)):
        raise UsageError(
            f"{path}: found {iteration} updates asked for, but the run has {len(run.iterations)}; required no more. "
            f"`metaloom resume {path} --iterations {iteration}` makes more"
        )
    update = run.load(storage.learner_ref(iteration))
    assert isinstance(update, Update)
    steps = config.algorithm.inner_steps if adaptation_steps is None else adaptation_steps
    if steps < 0 or (steps and not config.algorithm.inner_steps):
        raise UsageError(
            f"found {steps} adaptation steps; required 0 or more, and 0 for a run that trains with inner_steps=0"
        )
    if num_tasks is not None:
        if num_tasks < 1:
            raise UsageError(f"found {num_tasks} tasks; required at least 1")
        # Not a configuration to train with: SVPG's particles take turns at any number of tasks.
        config = config.model_copy(update={"num_tasks": num_tasks})
    with stages_of(config, backend) as stages:
        return _evaluate(stages, config, update.learner, iteration, steps, seed)


def _evaluate(
    stages: OnPolicyStages, config: RunConfig, learner: LearnerState, iteration: int, steps: int, seed: int
) -> Evaluation:
    # Halved because run seeds are below 2**63.
    run_seed = seed_for(config.seed, "evaluation", seed) // 2
    tasks = sample_tasks(stages.env, num_tasks=config.num_tasks, run_seed=run_seed, iteration=0)
    params = acting_params(stages.algorithm, learner, config.num_tasks)
    rounds: list[EpisodeBatch] = []
    for k in range(steps + 1):
        rounds.append(stages.rollouts.collect(params, tasks, RolloutPosition(run_seed, 0, k)))
        if k < steps:
            seed = seed_for(run_seed, "baseline", 0, k)
            samples = process_samples(rounds[k], config.baseline.build(), config.processing, seed=seed)
            # Beyond the steps of training, the last trained step's size applies.
            trained = min(k, config.algorithm.inner_steps - 1)
            step = Step(rounds[k], samples, trained)
            params = adapt(stages.policy, stages.algorithm, learner, params, step, parallel=stages.parallel)
    return Evaluation(iteration, tasks, tuple(rounds))

"""Per-task adaptation from the task's episodes: by an inner step, through the actor's memory, or by inference."""

from dataclasses import replace
from functools import partial

from metaloom.pipeline.algorithms.contract import AnyLearner
from metaloom.pipeline.dataflow.stage import AFTER_TRAINING, INNER_STEP, At, Per, Stage
from metaloom.pipeline.replay.buffer import ContextRounds
from metaloom.pipeline.types import EpisodeBatch, ParallelMap, Samples, Step, TaskParams, Update
from metaloom.stages.counters import require_params
from metaloom.stages.memory.replay import plan_of
from metaloom.stages.tools import acting_params


def adapt(
    learner: AnyLearner,
    at: At,
    parallel: ParallelMap,
    *,
    state: Update,
    params: Update | TaskParams,
    episodes: EpisodeBatch,
    samples: Samples | None,
) -> TaskParams:
    """Return each task's parameters after one inner step on the task's samples, [B, ...].

    Without samples, the parameters contain the actor's memory after a rollout batch of one trial per task. Training
    does not need this, because its actors keep their memory across the episodes of a trial.
    """
    num_tasks = len(episodes.lengths)
    before = acting_params(learner, params, at, num_tasks)
    evidence = episodes if samples is None else Step(episodes, samples, at.step)
    found = learner.adapt(learner.at_start(state.learner, run_seed=at.run_seed), before, evidence, parallel=parallel)
    return require_params(found, num_tasks, learner, "adapt", like=None if samples is None else before)


def infer_task(
    learner: AnyLearner, at: At, parallel: ParallelMap, *, state: Update, episodes: tuple[EpisodeBatch, ...]
) -> TaskParams:
    """Return each task's posterior, the only task parameters that adaptation changes.

    In training, it is inferred from a random sample of the transitions; in evaluations, from all of them.
    """
    position = (at.run_seed, at.iteration, at.step) if at.training else None
    start = learner.at_start(state.learner, run_seed=at.run_seed)
    found = learner.adapt(start, TaskParams({}), ContextRounds(episodes, position), parallel=parallel)
    return require_params(found, len(episodes[0].lengths), learner, "adapt")


ADAPT = Stage(
    adapt,
    INNER_STEP,
    reads={"state": "learner", "params": "acting", "episodes": "rollouts", "samples": "samples"},
    group="adapted_{step}",
    thinnable=True,
)
REMEMBER = replace(
    ADAPT,
    run=partial(adapt, samples=None),
    per=AFTER_TRAINING,
    reads={"state": "learner", "params": "acting", "episodes": "rollouts"},
)
ROUND = Per("per rollout batch", lambda config, i: range(len(plan_of(config).rounds)), stepped=True)
IN_CONTEXT = Per(
    "per rollout batch that tasks are inferred from",
    lambda config, i: [k for k, part in enumerate(plan_of(config).rounds) if part.in_context],
    stepped=True,
)
BEFORE_POSTERIOR = Per(
    "before rollout batches by the posterior",
    lambda config, i: [k - 1 for k, part in enumerate(plan_of(config).rounds) if part.from_posterior],
    stepped=True,
)
INFER_TASK = Stage(
    infer_task,
    BEFORE_POSTERIOR,
    name="adapt",
    reads={"state": "learner", "episodes": "context"},
    group="adapted_{step}",
    thinnable=True,
)

"""Update of the meta-parameters, which ends an iteration."""

from dataclasses import replace

from metaloom.pipeline.algorithms.contract import AnyLearner
from metaloom.pipeline.dataflow.outputs import SpanOutputs
from metaloom.pipeline.dataflow.stage import ITERATION, At, Stage
from metaloom.pipeline.estimation.diagnostics import Measures, step_metrics, with_own
from metaloom.pipeline.replay.index import TrialExperience
from metaloom.pipeline.types import EpisodeBatch, Metrics, ParallelMap, Samples, Step, Update
from metaloom.stages.counters import updated
from metaloom.stages.memory.replay import StoredTrials


def meta_optimize(
    learner: AnyLearner,
    at: At,
    parallel: ParallelMap,
    measures: Measures,
    *,
    state: Update,
    episodes: tuple[EpisodeBatch, ...],
    samples: tuple[Samples, ...],
) -> Update:
    """Compute the learner for the next iteration and the metrics of this one.

    Gradients do not cross stages: the adaptation is recomputed from the episodes and samples of all inner steps.
    """
    steps = [Step(e, s, k) for k, (e, s) in enumerate(zip(episodes, samples, strict=True))]
    metrics: Metrics = {}
    for step in steps:
        metrics |= with_own(step_metrics(step), measures.of_step(step))
    return updated(learner, at, parallel, state=state, experience=steps, rounds=episodes, metrics=metrics)


def meta_optimize_with_trials(
    learner: AnyLearner,
    at: At,
    parallel: ParallelMap,
    measures: Measures,
    trials: StoredTrials,
    *,
    state: Update,
    episodes: EpisodeBatch,
    samples: Samples,
    rounds: SpanOutputs,
) -> Update:
    """Compute the next learner: the policy learns from this iteration's trials, the model also from recent ones."""
    step = Step(episodes, samples, at.step)
    experience = TrialExperience(step, trials.buffer(rounds))
    metrics = with_own(step_metrics(step), measures.of_step(step))
    return updated(learner, at, parallel, state=state, experience=experience, rounds=[episodes], metrics=metrics)


META_OPTIMIZE = Stage(
    meta_optimize,
    ITERATION,
    reads={"state": "learner", "episodes": "all_rollouts", "samples": "all_samples"},
    group="learner",
    ends_iteration=True,
)
META_OPTIMIZE_WITH_TRIALS = replace(
    META_OPTIMIZE,
    run=meta_optimize_with_trials,
    reads={"state": "learner", "episodes": "rollouts", "samples": "samples", "rounds": "history"},
)

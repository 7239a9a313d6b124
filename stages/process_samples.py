"""Computation of a rollout batch's returns, values and advantages."""

from metaloom.pipeline.algorithms.contract import AnyLearner
from metaloom.pipeline.dataflow.stage import EACH_STEP, At, Stage
from metaloom.pipeline.seeding import seed_for
from metaloom.pipeline.types import EpisodeBatch, ParallelMap, Samples, Update


def process_samples(
    learner: AnyLearner, at: At, parallel: ParallelMap, *, state: Update, episodes: EpisodeBatch
) -> Samples:
    """Compute the returns, values and advantages of a rollout batch, each [B, E, T]."""
    seed = seed_for(at.run_seed, "baseline", at.iteration, at.step)
    start = learner.at_start(state.learner, run_seed=at.run_seed)
    return learner.process(start, episodes, seed=seed, parallel=parallel)


PROCESS_SAMPLES = Stage(
    process_samples,
    EACH_STEP,
    reads={"state": "learner", "episodes": "rollouts"},
    group="samples_{step}",
    thinnable=True,
)

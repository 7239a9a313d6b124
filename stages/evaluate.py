"""How a learner adapts to tasks: fresh episodes to adapt to, and after every step fresh episodes to be judged by."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from pipeline.algorithms import Algorithm
from pipeline.algorithms.contract import ParallelMap
from pipeline.baselines import Baseline
from pipeline.config import ProcessingConfig
from pipeline.policies.gaussian import GaussianPolicy
from pipeline.seeding import seed_for
from pipeline.types import Array, EpisodeBatch, Evaluation, LearnerState, Step, TaskBatch, TaskParams
from stages.adapt import adapt
from stages.collect_rollouts import RolloutPosition
from stages.process_samples import process_samples
from stages.rollout_faults import RolloutError, describe

Collect = Callable[[TaskParams, TaskBatch, RolloutPosition], EpisodeBatch]

_ADAPTATION, _TEST = 0, 1
"""What stands for the iteration in the positions of the evaluation's episodes."""


def evaluate(
    policy: GaussianPolicy,
    algorithm: Algorithm,
    learner: LearnerState,
    params: TaskParams,
    tasks: TaskBatch,
    *,
    adaptation_steps: int,
    adaptation_rollouts: Collect,
    test_rollouts: Collect,
    baseline: Callable[[], Baseline],
    processing: ProcessingConfig,
    run_seed: int,
    parallel: ParallelMap = map,
) -> Evaluation:
    """Returns after 0 ... K adaptation steps, by episodes that no step has seen.

    The random numbers of step k do not depend on K, so more steps prolong a curve without changing it.

    Args:
        policy: the policy.
        algorithm: what an adaptation step does; beyond those of training its last step is repeated.
        learner: holds the step sizes when they are learned.
        params: what the tasks act with before adaptation.
        tasks: the tasks.
        adaptation_steps: K.
        adaptation_rollouts: collects the episodes to adapt to.
        test_rollouts: collects the episodes that count.
        baseline: makes the baseline of processing.
        processing: as in training.
        run_seed: stands for the run's seed.
        parallel: maps over chunks of tasks; the result does not depend on it.
    """
    tests: list[EpisodeBatch] = []
    seen: list[EpisodeBatch] = []
    for k in range(adaptation_steps + 1):
        with _told_as(f"test episodes after {k} adaptation steps"):
            tests.append(test_rollouts(params, tasks, RolloutPosition(run_seed, _TEST, k)))
        if k < adaptation_steps:
            with _told_as(f"episodes of adaptation step {k + 1}"):
                seen.append(adaptation_rollouts(params, tasks, RolloutPosition(run_seed, _ADAPTATION, k)))
            seed = seed_for(run_seed, "baseline", _ADAPTATION, k)
            samples = process_samples(seen[k], baseline(), processing, seed=seed, parallel=parallel)
            step = Step(seen[k], samples, min(k, algorithm.inner_steps - 1))
            params = adapt(policy, algorithm, learner, params, step, parallel=parallel)
    return Evaluation(
        task_params=tasks.params,
        task_ids=tasks.ids,
        names=tasks.names,
        units=tasks.units,
        **_outcomes("test", tests, len(tasks)),
        **_outcomes("adaptation", seen, len(tasks)),
    )


@contextmanager
def _told_as(episodes: str) -> Iterator[None]:
    """Have faults of rollouts say which ones: their positions count no iterations of the run."""
    try:
        yield
    except RolloutError as fault:
        about = {**fault.about, "evaluation": episodes}
        raise RolloutError(describe(about), about, fault.arrays) from fault


def _outcomes(kind: str, rounds: Sequence[EpisodeBatch], num_tasks: int) -> dict[str, Array]:
    """[B, rounds, E] each, of what is kept of episodes."""
    if not rounds:
        empty = np.zeros((num_tasks, 0, 0))
        return {f"{kind}_{name}": empty.astype(dtype) for name, dtype in _OUTCOMES.items()}
    return {
        f"{kind}_returns": np.stack([episodes.episode_returns for episodes in rounds], axis=1),
        f"{kind}_lengths": np.stack([episodes.lengths for episodes in rounds], axis=1),
        f"{kind}_terminated": np.stack([episodes.terminated for episodes in rounds], axis=1),
    }


_OUTCOMES = {"returns": np.float64, "lengths": np.int32, "terminated": np.bool_}

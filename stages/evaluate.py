"""How a learner adapts to tasks: fresh episodes to adapt to, and after every step fresh episodes to be judged by."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from metaloom.pipeline.algorithms.contract import Algorithm
from metaloom.pipeline.baselines import Baseline
from metaloom.pipeline.estimation.config import ProcessingConfig
from metaloom.pipeline.policies.gaussian import GaussianPolicy
from metaloom.pipeline.seeding import seed_for
from metaloom.pipeline.types import (
    Array,
    EpisodeBatch,
    Evaluation,
    LearnerState,
    ParallelMap,
    Step,
    TaskBatch,
    TaskParams,
)
from metaloom.stages.adapt import adapt
from metaloom.stages.collect_rollouts import RolloutPosition
from metaloom.stages.process_samples import process_samples
from metaloom.stages.rollouts.faults import RolloutError, describe

Collect = Callable[[TaskParams, TaskBatch, RolloutPosition], EpisodeBatch]

Adapted = Callable[[int, TaskParams, EpisodeBatch], TaskParams]

Tested = Callable[[int, EpisodeBatch], object]
"""Is shown the test episodes after each number of adaptation steps."""

_ADAPTATION, _TEST = 0, 1
"""What stands for the iteration in the positions of the evaluation's episodes."""


def unseen(k: int, episodes: EpisodeBatch) -> None:
    """Nobody is shown the test episodes."""
    del k, episodes


def evaluate(
    params: TaskParams,
    tasks: TaskBatch,
    *,
    adaptation_steps: int,
    adaptation_rollouts: Collect,
    test_rollouts: Collect,
    adapted: Adapted,
    run_seed: int,
    returns: Callable[[EpisodeBatch], Array] = lambda episodes: episodes.episode_returns,
    tested: Tested = unseen,
) -> Evaluation:
    """Returns after 0 ... K adaptation steps, by episodes that no step has seen.

    The random numbers of step k do not depend on K, so more steps prolong a curve without changing it.

    Args:
        params: what the tasks act with before adaptation.
        tasks: the tasks.
        adaptation_steps: K.
        adaptation_rollouts: collects the episodes to adapt to.
        test_rollouts: collects the episodes that count.
        adapted: what the tasks act with after step k, from what they acted with before it and its episodes.
        run_seed: stands for the run's seed.
        returns: [B, E] of episodes; the sum of their rewards unless others count.
        tested: is shown the test episodes, which are not kept otherwise.
    """
    test_rollouts = _shown(test_rollouts, tested)
    # Only outcomes are kept: the observations of one round can fill a good part of the memory.
    tests: list[_Outcome] = []
    seen: list[_Outcome] = []
    for k in range(adaptation_steps + 1):
        with _told_as(f"test episodes after {k} adaptation steps"):
            tests.append(_outcome(test_rollouts(params, tasks, RolloutPosition(run_seed, _TEST, k)), returns))
        if k < adaptation_steps:
            with _told_as(f"episodes of adaptation step {k + 1}"):
                episodes = adaptation_rollouts(params, tasks, RolloutPosition(run_seed, _ADAPTATION, k))
            seen.append(_outcome(episodes, returns))
            params = adapted(k, params, episodes)
    return Evaluation(
        task_params=tasks.params,
        task_ids=tasks.ids,
        names=tasks.names,
        units=tasks.units,
        **_outcomes("test", tests, len(tasks)),
        **_outcomes("adaptation", seen, len(tasks)),
    )


def by_inner_steps(
    policy: GaussianPolicy,
    algorithm: Algorithm,
    learner: LearnerState,
    *,
    baseline: Callable[[], Baseline],
    processing: ProcessingConfig,
    run_seed: int,
    parallel: ParallelMap = map,
) -> Adapted:
    """Adaptation as in training: process the episodes of a step, then take the algorithm's inner step.

    Args:
        policy: the policy.
        algorithm: what an adaptation step does; beyond those of training its last step is repeated.
        learner: holds the step sizes when they are learned.
        baseline: makes the baseline of processing.
        processing: as in training.
        run_seed: stands for the run's seed.
        parallel: maps over chunks of tasks; the result does not depend on it.
    """

    def adapted(k: int, params: TaskParams, episodes: EpisodeBatch) -> TaskParams:
        seed = seed_for(run_seed, "baseline", _ADAPTATION, k)
        samples = process_samples(episodes, baseline(), processing, seed=seed, parallel=parallel)
        step = Step(episodes, samples, min(k, algorithm.inner_steps - 1))
        return adapt(policy, algorithm, learner, params, step, parallel=parallel)

    return adapted


def _shown(collect: Collect, tested: Tested) -> Collect:
    def collected(params: TaskParams, tasks: TaskBatch, position: RolloutPosition) -> EpisodeBatch:
        episodes = collect(params, tasks, position)
        tested(position.step, episodes)
        return episodes

    return collected


class _Outcome(NamedTuple):
    """[B, E] each: what is kept of a round of episodes."""

    returns: Array
    lengths: Array
    terminated: Array


def _outcome(episodes: EpisodeBatch, returns: Callable[[EpisodeBatch], Array]) -> _Outcome:
    return _Outcome(returns(episodes), episodes.lengths, episodes.terminated)


@contextmanager
def _told_as(episodes: str) -> Iterator[None]:
    """Have faults of rollouts say which ones: their positions count no iterations of the run."""
    try:
        yield
    except RolloutError as fault:
        about = {**fault.about, "evaluation": episodes}
        raise RolloutError(describe(about), about, fault.arrays) from fault


def _outcomes(kind: str, rounds: Sequence[_Outcome], num_tasks: int) -> dict[str, Array]:
    """[B, rounds, E] each."""
    if not rounds:
        empty = np.zeros((num_tasks, 0, 0))
        columns = [empty, empty.astype(np.int32), empty.astype(np.bool_)]
    else:
        columns = [np.stack(column, axis=1) for column in zip(*rounds, strict=True)]
    return {f"{kind}_{name}": column for name, column in zip(_Outcome._fields, columns, strict=True)}

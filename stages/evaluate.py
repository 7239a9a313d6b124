"""Evaluation of a learner: fresh episodes to adapt to, and after every step fresh episodes that measure its return."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from metaloom.pipeline.algorithms.contract import Learner
from metaloom.pipeline.types import (
    Array,
    EpisodeBatch,
    Evaluation,
    LearnerState,
    ParallelMap,
    TaskBatch,
    TaskParams,
)
from metaloom.stages.collect_rollouts import RolloutPosition
from metaloom.stages.counters import require_adapted
from metaloom.stages.rollouts.faults import RolloutError, describe

Collect = Callable[[TaskParams, TaskBatch, RolloutPosition], EpisodeBatch]

Tested = Callable[[int, EpisodeBatch], object]
"""Is shown the test episodes after each number of adaptation steps."""

_ADAPTATION, _TEST = 0, 1
"""Stand-in for the iteration in the positions of an evaluation's episodes."""


def unseen(k: int, episodes: EpisodeBatch) -> None:
    """Nobody is shown the test episodes."""


def test_position(run_seed: int, k: int) -> RolloutPosition:
    """Return the position of the test episodes after k adaptation steps."""
    return RolloutPosition(run_seed, _TEST, k)


def total_rewards(episodes: EpisodeBatch) -> Array:
    """Return the sum of rewards of each episode, shape [B, E]."""
    return episodes.episode_returns


def evaluate(
    learner: Learner[Any, Any],
    state: LearnerState,
    tasks: TaskBatch,
    *,
    adaptation_steps: int,
    adaptation_rollouts: Collect,
    test_rollouts: Collect,
    run_seed: int,
    parallel: ParallelMap = map,
    returns: Callable[[EpisodeBatch], Array] = total_rewards,
    tested: Tested = unseen,
) -> Evaluation:
    """Measure returns after 0 ... K adaptation steps, on episodes that no step has used.

    The random streams of step k do not depend on K, so more steps extend a curve without changing it.

    Args:
        learner: Algorithm that acts and adapts.
        state: Learner state to evaluate.
        tasks: Tasks to evaluate on.
        adaptation_steps: K.
        adaptation_rollouts: Collects the episodes to adapt to.
        test_rollouts: Collects the episodes to measure.
        run_seed: Seed used instead of the run's seed.
        parallel: Maps over chunks of tasks; the result does not depend on it.
        returns: Computes the return [B, E] of episodes; default: the sum of rewards.
        tested: Receives the test episodes, which are not kept otherwise.
    """
    test_rollouts = _shown(test_rollouts, tested)
    params = learner.acting_params(state, len(tasks))
    # Keep outcomes, and of earlier batches only what tasks are inferred from: one batch can fill much of the memory.
    tests: list[_Outcome] = []
    adaptations: list[_Outcome] = []
    rounds: list[EpisodeBatch] = []
    for k in range(adaptation_steps + 1):
        with _told_as(f"test episodes after {k} adaptation steps"):
            tests.append(_outcome(test_rollouts(params, tasks, test_position(run_seed, k)), returns))
        if k < adaptation_steps:
            with _told_as(f"episodes of adaptation step {k + 1}"):
                rounds.append(adaptation_rollouts(params, tasks, RolloutPosition(run_seed, _ADAPTATION, k)))
            found = learner.adapt_to_episodes(state, params, rounds, run_seed=run_seed, parallel=parallel)
            params = require_adapted(found, len(tasks), learner)
            adaptations.append(_outcome(rounds[-1], returns))
            rounds[-1] = replace(rounds[-1], behavior={}, reward_terms={}, facts={})
    return Evaluation(
        task_params=tasks.params,
        task_ids=tasks.ids,
        names=tasks.names,
        units=tasks.units,
        **_outcomes("test", tests, len(tasks)),
        **_outcomes("adaptation", adaptations, len(tasks)),
        test_facts=(facts := _facts(tests, {})),
        adaptation_facts=_facts(adaptations, {name: values[:, :0, :0] for name, values in facts.items()}),
    )


def _shown(collect: Collect, tested: Tested) -> Collect:
    def collected(params: TaskParams, tasks: TaskBatch, position: RolloutPosition) -> EpisodeBatch:
        episodes = collect(params, tasks, position)
        tested(position.step, episodes)
        return episodes

    return collected


class _Outcome(NamedTuple):
    """Measurements kept from a rollout batch, shape [B, E] each."""

    returns: Array
    lengths: Array
    terminated: Array
    facts: Mapping[str, Array]


_COLUMNS = ("returns", "lengths", "terminated")


def _outcome(episodes: EpisodeBatch, returns: Callable[[EpisodeBatch], Array]) -> _Outcome:
    return _Outcome(returns(episodes), episodes.lengths, episodes.terminated, episodes.episode_facts)


@contextmanager
def _told_as(episodes: str) -> Iterator[None]:
    """Add the kind of evaluation episodes to faults, since their positions count no iterations of the run."""
    try:
        yield
    except RolloutError as fault:
        about = {**fault.about, "evaluation": episodes}
        raise RolloutError(describe(about), about, fault.arrays) from fault


def _outcomes(kind: str, rounds: Sequence[_Outcome], num_tasks: int) -> dict[str, Array]:
    """Join the outcomes by name, shape [B, steps, E] each."""
    if not rounds:
        empty = np.zeros((num_tasks, 0, 0))
        columns = [empty, empty.astype(np.int32), empty.astype(np.bool_)]
    else:
        columns = [np.stack([getattr(round, name) for round in rounds], axis=1) for name in _COLUMNS]
    return {f"{kind}_{name}": column for name, column in zip(_COLUMNS, columns, strict=True)}


def _facts(rounds: Sequence[_Outcome], without: Mapping[str, Array]) -> dict[str, Array]:
    """Join the facts by name, shape [B, steps, E] each. `without` is returned if there are no outcomes."""
    if not rounds:
        return dict(without)
    return {name: np.stack([round.facts[name] for round in rounds], axis=1) for name in rounds[0].facts}

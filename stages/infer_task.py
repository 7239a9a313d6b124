"""What task it is: a belief from the transitions that were seen of it."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from metaloom.pipeline.replay.columns import TransitionColumns
from metaloom.pipeline.seeding import generator
from metaloom.pipeline.types import Array, EpisodeBatch, LearnerState, Params, TaskParams
from metaloom.stages.evaluate import Adapted


def infer_tasks(
    algorithm: Any,
    learner: LearnerState,
    rounds: Sequence[EpisodeBatch],
    *,
    num_transitions: int | None = None,
    context_rewards: Callable[[Array], Array] | None = None,
    position: tuple[int, ...] = (),
) -> TaskParams:
    """Every task's belief, from the episodes that were collected of it.

    Args:
        algorithm: infers a belief from a context.
        learner: holds the parameters that it infers with.
        rounds: episodes of the same B tasks.
        num_transitions: draw so many of a task's transitions; all of them when None.
        context_rewards: gives the rewards that a context shows instead, from those of the episodes.
        position: run seed, iteration and inner step, from which the draws are made.
    """
    first = rounds[0]
    columns = TransitionColumns(first.observations.shape[-1], first.actions.shape[-1])
    beliefs: list[Params] = []
    for b in range(len(first.rewards)):
        seen = np.concatenate([_rows_of_task(columns, episodes, b) for episodes in rounds])
        places = np.arange(len(seen))
        if num_transitions is not None:
            run_seed, *place = position
            rng = generator(run_seed, "context", *place, b)
            places = rng.choice(places, num_transitions, replace=len(places) < num_transitions)
        # One task at a time: they may differ in how much there is to see.
        context = columns.unpack(seen[places][None])
        if context_rewards is not None:
            context = replace(context, rewards=context_rewards(context.rewards))
        beliefs.append(algorithm.infer(learner, context).params)
    return TaskParams({name: np.concatenate([belief[name] for belief in beliefs]) for name in beliefs[0]})


def _rows_of_task(columns: TransitionColumns, episodes: EpisodeBatch, b: int) -> Array:
    """[n, W], the real steps of task b."""
    e, t = np.nonzero(episodes.mask[b])
    return columns.pack(episodes, np.full_like(e, b), e, t)


def by_inference(
    algorithm: Any,
    learner: LearnerState,
    *,
    first_inference: int,
    context_rewards: Callable[[Array], Array] | None,
) -> Adapted:
    """Adaptation of an evaluation: infer every task from all that was seen of it since the evaluation began.

    Args:
        algorithm: infers a belief from a context.
        learner: holds the parameters that it infers with.
        first_inference: how many episodes of a task there must be before it is inferred for the first time.
        context_rewards: gives the rewards that a context shows instead, from those of the episodes.
    """
    seen: list[EpisodeBatch] = []

    def adapted(k: int, params: TaskParams, episodes: EpisodeBatch) -> TaskParams:
        del k
        seen.append(episodes)
        if sum(batch.rewards.shape[1] for batch in seen) < first_inference:
            return params
        belief = infer_tasks(algorithm, learner, seen, context_rewards=context_rewards)
        return TaskParams({**params.params, **belief.params})

    return adapted

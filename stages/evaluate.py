"""Evaluation of a learner: fresh episodes for every adaptation step, and fresh test episodes after it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from metaloom.pipeline.algorithms.contract import Learner
from metaloom.pipeline.config.run import RunConfig
from metaloom.pipeline.dataflow.stage import EVALUATION, At, Stage
from metaloom.pipeline.envs.contract import MetaEnv
from metaloom.pipeline.tasks.evaluation import EvaluationPlan, evaluation_tasks
from metaloom.pipeline.types import Array, EpisodeBatch, Evaluation, TaskBatch, TaskParams, Update
from metaloom.stages.memory.replay import plan_of
from metaloom.stages.rollouts.faults import RolloutError, RolloutPosition, describe
from metaloom.stages.tools import Adaptation, Rollouts, Tested

Collect = Callable[[TaskParams, TaskBatch, RolloutPosition], EpisodeBatch]

_ADAPTATION, _TEST = 0, 1
"""Value in place of the iteration number in the positions of evaluation episodes."""


def evaluate(
    learner: Learner[Any, Any],
    config: RunConfig,
    env: MetaEnv,
    rollouts: Rollouts,
    adaptation: Adaptation,
    tested: Tested,
    at: At,
    *,
    state: Update,
) -> Evaluation:
    """Measure returns after 0 ... K adaptation steps, on episodes not used for adaptation.

    Adaptation episodes draw their actions even if test episodes are deterministic. For policies with memory, the
    settings decide.
    """
    drawn = config.algorithm.trial is None or config.evaluation.remembered == "drawn"
    return _evaluated(learner, config, env, rollouts, adaptation, tested, at, state, drawn, _total_rewards)


def evaluate_inference(
    learner: Learner[Any, Any],
    config: RunConfig,
    env: MetaEnv,
    rollouts: Rollouts,
    adaptation: Adaptation,
    tested: Tested,
    at: At,
    *,
    state: Update,
) -> Evaluation:
    """Measure returns under the prior, and after inferring each task from 1 ... K rollout batches.

    If test episodes are deterministic, so are the episodes used for inference: they explore by sampling latents, not
    actions.
    """

    def sparse(episodes: EpisodeBatch) -> Array:
        return (env.sparse_rewards(episodes.rewards) * episodes.mask).sum(axis=2, dtype=np.float64)

    returns = sparse if plan_of(config).scores_sparse_rewards else _total_rewards
    return _evaluated(learner, config, env, rollouts, adaptation, tested, at, state, False, returns)


def evaluation_position(config: RunConfig, i: int, k: int) -> tuple[int, ...]:
    """Return the position of an evaluation. All evaluations are comparable: same tasks, same seeds."""
    return (config.seed, config.evaluation.seed)


EVALUATE = Stage(
    evaluate,
    EVALUATION,
    reads={"state": "updated"},
    group="evaluation",
    samples=True,
    seed_position=evaluation_position,
)
EVALUATE_INFERENCE = Stage(
    evaluate_inference,
    EVALUATION,
    name="evaluate",
    reads={"state": "updated"},
    group="evaluation",
    samples=True,
    seed_position=evaluation_position,
)


def unseen(k: int, episodes: EpisodeBatch) -> None:
    """Discard the test episodes."""


def test_position(run_seed: int, k: int) -> RolloutPosition:
    """Return the position of the test episodes after k adaptation steps."""
    return RolloutPosition(run_seed, _TEST, k)


def _total_rewards(episodes: EpisodeBatch) -> Array:
    return episodes.episode_returns


def _evaluated(
    learner: Learner[Any, Any],
    config: RunConfig,
    env: MetaEnv,
    rollouts: Rollouts,
    adaptation: Adaptation,
    tested: Tested,
    at: At,
    update: Update,
    draws_actions: bool,
    returns: Callable[[EpisodeBatch], Array],
) -> Evaluation:
    """Evaluate the learner after the update of an iteration.

    The random streams of step k do not depend on K, so more steps extend a curve without changing it.
    """
    plan, state = EvaluationPlan.of(config), update.learner
    tasks = evaluation_tasks(config, env, at.iteration + 1)
    adaptation_rollouts = rollouts.sampling(
        plan.episodes,
        deterministic=plan.deterministic and not draws_actions,
        one_trial=config.algorithm.trial is not None,
    )
    test_rollouts = _shown(rollouts.sampling(plan.test_episodes, deterministic=plan.deterministic).collect, tested)
    params = learner.acting_params(state, len(tasks))
    # Keep outcomes, and only the inference data of earlier batches: one batch can fill much of the memory.
    tests: list[_Outcome] = []
    adaptations: list[_Outcome] = []
    rounds: list[EpisodeBatch] = []
    for k in range(plan.adaptation_steps + 1):
        with _told_as(f"test episodes after {k} adaptation steps"):
            tests.append(_outcome(test_rollouts(params, tasks, test_position(plan.run_seed, k)), returns))
        if k < plan.adaptation_steps:
            with _told_as(f"episodes of adaptation step {k + 1}"):
                position = RolloutPosition(plan.run_seed, _ADAPTATION, k)
                rounds.append(adaptation_rollouts.collect(params, tasks, position))
            params = adaptation.adapt(state, params, rounds, run_seed=plan.run_seed)
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
    """Outcomes of a rollout batch, shape [B, E] each."""

    returns: Array
    lengths: Array
    terminated: Array
    facts: Mapping[str, Array]


_COLUMNS = ("returns", "lengths", "terminated")


def _outcome(episodes: EpisodeBatch, returns: Callable[[EpisodeBatch], Array]) -> _Outcome:
    return _Outcome(returns(episodes), episodes.lengths, episodes.terminated, episodes.episode_facts)


@contextmanager
def _told_as(episodes: str) -> Iterator[None]:
    """Add the kind of evaluation episode to faults, since these positions have no iteration number."""
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

"""Evaluation of a learner, with new episodes for every adaptation step and new test episodes after each."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np

from metaloom.pipeline.algorithms.contract import AnyLearner
from metaloom.pipeline.config.run import RunConfig
from metaloom.pipeline.dataflow.stage import EVALUATION, At, Stage
from metaloom.pipeline.envs.contract import MetaEnv
from metaloom.pipeline.tasks.evaluation import EvaluationPlan, evaluation_tasks
from metaloom.pipeline.types import Array, EpisodeBatch, Evaluation, Update
from metaloom.stages.memory.replay import plan_of
from metaloom.stages.rollouts.faults import RolloutError, RolloutPosition, describe
from metaloom.stages.tools import Adaptation, Rollouts, Tested

_Outcome = tuple[Mapping[str, Array], Mapping[str, Array]]
_ADAPTATION, _TEST = 0, 1  # values that replace the iteration number in the positions of evaluation episodes


def evaluate(
    learner: AnyLearner,
    config: RunConfig,
    env: MetaEnv,
    rollouts: Rollouts,
    adaptation: Adaptation,
    tested: Tested,
    at: At,
    *,
    state: Update,
    inferring: bool = False,
) -> Evaluation:
    """Measure returns after 0 ... K adaptation steps, on episodes not used for adaptation.

    Actions in adaptation episodes are sampled even if test episodes are deterministic, with two exceptions: policies
    with memory follow `evaluation.remembered`, and if tasks are inferred, sampled latents explore instead. The random
    streams of step k do not depend on K, so more steps extend a curve without changing it.
    """
    draws_actions = not inferring and (config.algorithm.trial is None or config.evaluation.remembered == "drawn")

    def returns(episodes: EpisodeBatch) -> Array:
        if not (inferring and plan_of(config).scores_sparse_rewards):
            return episodes.episode_returns
        return (env.sparse_rewards(episodes.rewards) * episodes.mask).sum(axis=2, dtype=np.float64)

    plan, before = EvaluationPlan.of(config), state.learner
    tasks = evaluation_tasks(config, env, at.iteration + 1)
    adaptation_rollouts = rollouts.sampling(
        plan.episodes,
        deterministic=plan.deterministic and not draws_actions,
        one_trial=config.algorithm.trial is not None,
    )
    test_rollouts = rollouts.sampling(plan.test_episodes, deterministic=plan.deterministic)
    params = learner.acting_params(before, len(tasks))
    # A batch can be large, so keep only outcomes, and only the data needed for inference from earlier batches.
    tests, adaptations, rounds = list[_Outcome](), list[_Outcome](), list[EpisodeBatch]()
    for k in range(plan.adaptation_steps + 1):
        with _faults_in(f"test episodes after {k} adaptation steps"):
            episodes = test_rollouts.collect(params, tasks, test_position(plan.run_seed, k))
        tested(k, episodes)
        tests.append(_outcome(episodes, returns(episodes)))
        del episodes
        if k < plan.adaptation_steps:
            with _faults_in(f"episodes of adaptation step {k + 1}"):
                position = RolloutPosition(plan.run_seed, _ADAPTATION, k)
                rounds.append(adaptation_rollouts.collect(params, tasks, position))
            params = adaptation.adapt(before, params, rounds, run_seed=plan.run_seed)
            adaptations.append(_outcome(rounds[-1], returns(rounds[-1])))
            rounds[-1] = replace(rounds[-1], behavior={}, reward_terms={}, facts={})
    measured, facts = (_stacked([one[n] for one in tests], {}) for n in (0, 1))
    adapted = _stacked([one[0] for one in adaptations], measured)
    return Evaluation(
        task_params=tasks.params,
        task_ids=tasks.ids,
        names=tasks.names,
        units=tasks.units,
        **{f"test_{name}": values for name, values in measured.items()},
        **{f"adaptation_{name}": values for name, values in adapted.items()},
        test_facts=facts,
        adaptation_facts=_stacked([one[1] for one in adaptations], facts),
    )


EVALUATE = Stage(
    partial(evaluate, inferring=False),
    EVALUATION,
    reads={"state": "updated"},
    group="evaluation",
    samples=True,
    # All evaluations use the same tasks and seeds, so that they can be compared.
    seed_position=lambda config, i, k: (config.seed, config.evaluation.seed),
)
EVALUATE_INFERENCE = replace(EVALUATE, run=partial(evaluate, inferring=True))


def unseen(k: int, episodes: EpisodeBatch) -> None:
    """Ignore the test episodes; for evaluations that do not store them."""


def test_position(run_seed: int, k: int) -> RolloutPosition:
    return RolloutPosition(run_seed, _TEST, k)


def _outcome(episodes: EpisodeBatch, returns: Array) -> _Outcome:
    """Return the measurements kept from a rollout batch, each [B, E], and its per-episode facts."""
    kept = {"returns": returns, "lengths": episodes.lengths, "terminated": episodes.terminated}
    return kept, episodes.episode_facts


@contextmanager
def _faults_in(episodes: str) -> Iterator[None]:
    """Within the block, add the kind of evaluation episode to faults, whose positions have no iteration number."""
    try:
        yield
    except RolloutError as fault:
        about = {**fault.about, "evaluation": episodes}
        raise RolloutError(describe(about), about, fault.arrays) from fault


def _stacked(batches: Sequence[Mapping[str, Array]], otherwise: Mapping[str, Array]) -> dict[str, Array]:
    """Stack same-named arrays as [B, steps, E]; without batches, return empty arrays with the names in `otherwise`."""
    if not batches:
        return {name: values[:, :0, :0] for name, values in otherwise.items()}
    return {name: np.stack([batch[name] for batch in batches], axis=1) for name in batches[0]}

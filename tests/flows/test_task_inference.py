"""Contexts of PEARL's evaluations and its training, as seen from the actors and the encoder."""

import sys
from contextlib import contextmanager
from dataclasses import dataclass, fields
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from metaloom.flows.graph.task_inference import _sample_tasks

import metaloom.flows.rollouts.workers
from metaloom import storage
from metaloom.flows.commands.train import train
from metaloom.flows.graph.run_stages import stages_of
from metaloom.flows.recipes import load_settings
from metaloom.flows.rollouts.workers import Backend
from metaloom.pipeline.algorithms.pearl.learner import PEARLLearner
from metaloom.pipeline.config.input import override
from metaloom.pipeline.config.run import build_config
from metaloom.pipeline.envs.point_pearl import PearlSparsePointRobot
from metaloom.pipeline.types import EpisodeBatch, LearnerState, TaskParams, Transitions
from metaloom.storage import StageRef

T = 5
TINY = [
    "iterations=2",
    "num_tasks=3",
    f"max_episode_steps={T}",
    "policy.hidden_sizes=[8]",
    "algorithm.critic_hidden_sizes=[8]",
    "algorithm.encoder_hidden_sizes=[8]",
    "algorithm.latent_size=2",
    f"algorithm.num_initial_steps={T}",
    f"algorithm.num_steps_prior={2 * T}",
    f"algorithm.num_steps_posterior={2 * T}",
    f"algorithm.num_extra_rl_steps_posterior={2 * T}",
    "algorithm.num_updates=1",
    "algorithm.meta_batch_size=2",
    "algorithm.batch_size=4",
    "algorithm.embedding_batch_size=7",
    "algorithm.num_exp_traj_eval=1",
    "evaluation.every=1",
    "evaluation.adaptation_steps=3",
    "evaluation.test_episodes=2",
]
TASKS = [[1.0, 0.0], [0.1, 0.1], [-1.0, 0.0], [0.6, 0.8], [0.0, 1.0]]
BELIEF = ("belief.mean", "belief.variance")


@dataclass(frozen=True)
class Collected:
    """A call of the sampler."""

    params: dict[str, np.ndarray]
    position: tuple[int, int]
    episodes: EpisodeBatch

    @property
    def is_test(self) -> bool:
        return self.position[0] == 1


def tiny(*changes: str):
    return build_config(override(load_settings("pearl-sparse-point-robot"), [*TINY, *changes]))


def tasks(*chosen: list[float]) -> str:
    return f"evaluation.tasks={list(chosen)}"


@contextmanager
def stages(*changes: str):
    """The stages of a run and a learner whose beliefs depend much on what was seen, and its actions on z."""
    with stages_of(tiny(*changes), Backend(workers=0)) as built:
        learner, rng = built.run(built.graph.learner_ref(0), {}).learner, np.random.default_rng(0)
        params = {
            name: rng.normal(0, 0.7, value.shape).astype(np.float32) if "output" in name else value
            for name, value in learner.params.items()
        }
        yield built, LearnerState(params, learner.optimizer, learner.extra)


@pytest.fixture
def collected(monkeypatch) -> list[Collected]:
    calls, real = [], metaloom.flows.rollouts.workers.collect_shard

    def spy(spec, params, tasks, position):
        episodes = real(spec, params, tasks, position)
        calls.append(Collected(dict(params.params), (position.iteration, position.step), episodes))
        return episodes

    monkeypatch.setattr(metaloom.flows.rollouts.workers, "collect_shard", spy)
    return calls


@pytest.fixture
def contexts(monkeypatch) -> list[Transitions]:
    """All that the encoder is shown, one task at a time."""
    shown, real = [], PEARLLearner.infer

    def spy(self, state, contexts) -> TaskParams:
        seen = list(contexts)
        shown.extend(seen)
        return real(self, state, seen)

    monkeypatch.setattr(PEARLLearner, "infer", spy)
    return shown


def is_prior(call: Collected) -> list[bool]:
    """Of every task."""
    mean, variance = (call.params[name] for name in BELIEF)
    return [bool((m == 0).all() and (v == 1).all()) for m, v in zip(mean, variance, strict=True)]


def test_every_evaluation_starts_every_task_from_the_prior(collected):
    with stages(tasks(*TASKS)) as (built, learner):
        first, second = built.evaluate(learner, 1), built.evaluate(learner, 1)
    assert len(collected) == 2 * (4 + 3)
    for evaluation in (collected[:7], collected[7:]):
        assert [call.position for call in evaluation[:2]] == [(1, 0), (0, 0)]
        assert [is_prior(call) == [True] * 5 for call in evaluation] == [True] * 2 + [False] * 5
        assert not any(any(is_prior(call)) for call in evaluation[2:])
    for field in fields(first):
        np.testing.assert_array_equal(getattr(first, field.name), getattr(second, field.name))


@pytest.mark.parametrize(
    "beside", [[], TASKS[1:], TASKS[:0:-1]], ids=["alone", "four others", "others in another order"]
)
def test_what_a_task_is_explored_and_tested_by_does_not_depend_on_other_tasks(beside, collected):
    """In garage, tasks share a policy that goes on with the posterior of the task before."""
    with stages(tasks(TASKS[0], *TASKS[1:3])) as (built, learner):
        expected = built.evaluate(learner, 1)
    with stages(tasks(TASKS[0], *beside)) as (built, learner):
        found = built.evaluate(learner, 1)
    for name in ("test_returns", "adaptation_returns"):
        np.testing.assert_array_equal(getattr(found, name)[0], getattr(expected, name)[0])
    assert len(collected) == 2 * 7
    for ours, theirs in zip(collected[:7], collected[7:], strict=True):
        for name in BELIEF:
            np.testing.assert_array_equal(ours.params[name][0], theirs.params[name][0])
        np.testing.assert_array_equal(ours.episodes.actions[0], theirs.episodes.actions[0])


def test_tasks_come_to_be_believed_different(collected):
    with stages(tasks(*TASKS)) as (built, learner):
        built.evaluate(learner, 1)
    assert len(np.unique(collected[-1].params["belief.mean"], axis=0)) == len(TASKS)


@pytest.mark.parametrize("deterministic", [True, False])
def test_deterministic_actions_are_the_means_in_context_and_test_episodes(deterministic, collected):
    with stages(f"evaluation.deterministic={str(deterministic).lower()}") as (built, learner):
        built.evaluate(learner, 1)
    assert {call.is_test for call in collected} == {False, True}
    for call in collected:
        means = np.tanh(call.episodes.behavior["mean"])
        assert np.allclose(call.episodes.actions, means, atol=1e-6) == deterministic


def test_z_differs_by_episode_also_where_actions_are_the_means(collected):
    with stages("evaluation.deterministic=true", tasks(*TASKS)) as (built, learner):
        built.evaluate(learner, 1)
    drawn = np.concatenate([call.episodes.behavior["latent"].reshape(-1, 2) for call in collected])
    assert len(drawn) == 5 * (4 * 2 + 3)
    assert len(np.unique(drawn, axis=0)) == len(drawn)
    by_prior = next(call for call in collected if call.is_test)
    # Equal starts and one policy: only z makes episodes different.
    assert len(np.unique(by_prior.episodes.actions.reshape(10, -1), axis=0)) == 10


@pytest.mark.parametrize("asked", [1, 2, 3, 9])
def test_tasks_are_inferred_once_there_are_as_many_episodes_as_asked_for(asked, collected, contexts):
    with stages(f"algorithm.num_exp_traj_eval={asked}", tasks(*TASKS)) as (built, learner):
        built.evaluate(learner, 1)
    assert [all(is_prior(call)) for call in collected if call.is_test] == [k < asked for k in range(4)]
    explored = [call for call in collected if not call.is_test]
    assert [all(is_prior(call)) for call in explored] == [k < asked for k in range(3)]
    # After each inference all episodes so far are shown, not the last alone.
    assert [context.rewards.shape for context in contexts] == [(1, n * T) for n in range(asked, 4) for _ in TASKS]


def test_rounds_of_several_episodes_count_each(collected):
    with stages("algorithm.num_exp_traj_eval=3", "evaluation.episodes=2") as (built, learner):
        built.evaluate(learner, 1)
    assert [all(is_prior(call)) for call in collected if call.is_test] == [True, True, False, False]


def sparse(distances: np.ndarray) -> np.ndarray:
    return np.where(distances <= 0.2, 1 - distances, 0)


class EndsSoon(PearlSparsePointRobot):
    """Ends at the first step that leads beyond a small radius."""

    def terminal(self, states, tasks):
        del tasks
        return np.abs(states).max(axis=1) > 0.12


@pytest.fixture
def ends_soon(monkeypatch) -> str:
    module = ModuleType("ending_envs")
    module.__dict__["EndsSoon"] = EndsSoon
    monkeypatch.setitem(sys.modules, "ending_envs", module)
    return "env=ending_envs:EndsSoon"


def test_context_and_returns_are_of_sparse_rewards_without_those_of_padding(ends_soon, collected, contexts):
    """A padded step is at distance 0, where the sparse reward is at its largest."""
    with stages(ends_soon, tasks(*TASKS[:2])) as (built, learner):
        outcome = built.evaluate(learner, 1)
    lengths = np.concatenate([call.episodes.lengths.ravel() for call in collected])
    assert lengths.min() < T
    tests = [call.episodes for call in collected if call.is_test]
    explored = [call.episodes for call in collected if not call.is_test]
    for b in range(2):
        for returns, rounds in ((outcome.test_returns, tests), (outcome.adaptation_returns, explored)):
            expected = [[sparse(-seen(episodes, b, e)).sum() for e in range(count(episodes))] for episodes in rounds]
            np.testing.assert_allclose(returns[b], expected, atol=1e-6)
        for k in range(3):
            shown = contexts[2 * k + b]
            dense = np.concatenate([seen(episodes, b, 0) for episodes in explored[: k + 1]])
            np.testing.assert_allclose(shown.rewards[0], sparse(-dense), atol=1e-6)
            np.testing.assert_array_equal(
                shown.observations[0],
                np.concatenate([e.observations[b, 0, : e.lengths[b, 0]] for e in explored[: k + 1]]),
            )
    assert outcome.test_returns[1].max() > 0  # the second goal is near the start
    assert (outcome.test_returns[0] == 0).all()  # the first is not


def seen(episodes: EpisodeBatch, b: int, e: int) -> np.ndarray:
    return episodes.rewards[b, e, : episodes.lengths[b, e]]


def count(episodes: EpisodeBatch) -> int:
    return episodes.lengths.shape[1]


def test_dense_rewards_count_where_nothing_sparse_is_asked_for(collected, contexts):
    with stages("env=pearl-point-robot", "algorithm.sparse_rewards=false") as (built, learner):
        outcome = built.evaluate(learner, 1)
    np.testing.assert_allclose(outcome.test_returns[:, 0], collected[0].episodes.rewards.sum(axis=2), rtol=1e-5)
    np.testing.assert_array_equal(contexts[0].rewards[0], collected[1].episodes.rewards[0, 0])


def test_training_infers_from_this_iterations_context_alone(tmp_path, contexts):
    """Rounds 0, 1 and 2 are context, 2 by the posterior; 3 and 4 are for actor and critics, 4 by the posterior."""
    train(tiny("evaluation.every=null"), tmp_path / "run", backend=Backend(workers=0))
    run = storage.open_run(tmp_path / "run")
    with stages_of(tiny(), Backend(workers=0)) as built:
        adapts = [ref for ref in built.order(1) if ref.stage == "adapt"]
        assert [ref.step for ref in adapts] == [1, 3]
        for ref, rounds in zip(adapts, ([0, 1], [0, 1, 2]), strict=True):
            context = [StageRef(1, "collect_rollouts", k) for k in rounds]
            assert built.inputs(ref) == [run.learner_ref(1), *context]
            del contexts[:]
            built.compute(ref, run)
            for b, shown in enumerate(contexts):
                assert shown.rewards.shape == (1, 7)
                batches = [run[1].rollouts(k) for k in rounds]
                steps = np.concatenate([of.observations[b, :, 1:].reshape(-1, 2) for of in batches])
                dense = np.concatenate([of.rewards[b].ravel() for of in batches])
                for place, reward in zip(shown.next_observations[0], shown.rewards[0], strict=True):
                    (at,) = np.nonzero((steps == place).all(axis=1))
                    np.testing.assert_allclose(reward, sparse(-dense[at[:1]])[0], atol=1e-6)


def test_every_iteration_of_every_seed_draws_its_tasks_anew():
    env = PearlSparsePointRobot()

    def drawn(seed, iteration):
        context = SimpleNamespace(env=env, config=SimpleNamespace(seed=seed, num_tasks=5))
        return _sample_tasks(context, iteration, 0).params.tobytes()

    assert len({drawn(seed, iteration) for seed in (1, 2) for iteration in range(3)}) == 6
    assert drawn(1, 2) == drawn(1, 2)

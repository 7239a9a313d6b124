"""What a belief is inferred from: the real steps of a task's own episodes, and nothing else."""

from dataclasses import dataclass, field

import numpy as np
import pytest

from metaloom.pipeline.algorithms.pearl.settings import PEARL
from metaloom.pipeline.estimation.config import ProcessingConfig
from metaloom.pipeline.policies import PolicyConfig
from metaloom.pipeline.policies.off_policy import OffPolicyPolicy
from metaloom.pipeline.types import EpisodeBatch, LearnerState, TaskParams, Transitions
from metaloom.stages.infer_task import by_inference, infer_tasks

NOTHING = LearnerState({}, {}, {})


@dataclass
class Spy:
    """Remembers contexts, and believes in the sum of their rewards with the variance 1 / C."""

    contexts: list[Transitions] = field(default_factory=list)

    def infer(self, learner: LearnerState, context: Transitions) -> TaskParams:
        del learner
        self.contexts.append(context)
        rewards = context.rewards
        return TaskParams(
            {
                "belief.mean": rewards.sum(axis=1, keepdims=True),
                "belief.variance": np.full((len(rewards), 1), 1 / rewards.shape[1], np.float32),
            }
        )

    def rewards(self) -> list[list[float]]:
        """Those of every context, each of one task."""
        return [context.rewards[0].tolist() for context in self.contexts]


@pytest.fixture
def spy() -> Spy:
    return Spy()


@pytest.fixture
def rounds(batch) -> list[EpisodeBatch]:
    """Two rounds of two tasks; a task's rewards count its steps up, and observations are 100 times as large."""
    return [
        counting(batch, [[[1, 2, 0], [3, 0, 0]], [[-1, -2, -3], [-4, -5, 0]]], [[2, 1], [3, 2]]),
        counting(batch, [[[4, 5, 6]], [[-6, 0, 0]]], [[3], [1]]),
    ]


def counting(batch, rewards, lengths) -> EpisodeBatch:
    observations = 100 * np.array(rewards, np.float32)[..., None]
    return batch(np.concatenate([observations, observations[:, :, -1:]], axis=2), rewards, lengths)


def test_a_context_is_every_real_step_of_the_tasks_own_episodes(spy, rounds):
    belief = infer_tasks(spy, NOTHING, rounds).params
    assert spy.rewards() == [[1, 2, 3, 4, 5, 6], [-1, -2, -3, -4, -5, -6]]
    for context in spy.contexts:
        np.testing.assert_array_equal(context.observations[..., 0], 100 * context.rewards)
    assert belief["belief.mean"].tolist() == [[21], [-21]]
    assert belief["belief.variance"].shape == (2, 1)


def test_other_rewards_are_shown_for_real_steps_alone(spy, rounds):
    # An end of zero rewards would show as so many ones.
    infer_tasks(spy, NOTHING, rounds[:1], context_rewards=lambda rewards: (rewards <= 0).astype(np.float32))
    assert spy.rewards() == [[0, 0, 0], [1, 1, 1, 1, 1]]


def test_what_is_drawn_is_of_the_task_and_none_twice_where_there_is_enough(spy, rounds):
    infer_tasks(spy, NOTHING, rounds, num_transitions=4, position=(0, 1, 2))
    for drawn, sign in zip(spy.rewards(), (1, -1), strict=True):
        assert len(set(drawn)) == 4
        assert {sign * value for value in drawn} <= {1, 2, 3, 4, 5, 6}


def test_where_there_is_too_little_it_is_drawn_with_replacement(spy, rounds):
    infer_tasks(spy, NOTHING, rounds[1:], num_transitions=8, position=(0, 1, 2))
    assert [len(drawn) for drawn in spy.rewards()] == [8, 8]
    assert set(spy.rewards()[0]) <= {4, 5, 6}
    assert set(spy.rewards()[1]) == {-6}


def test_draws_depend_on_the_position_and_the_task(spy, batch):
    rewards = np.tile(np.arange(50, dtype=np.float32), (2, 1, 1))
    same = batch(np.zeros((2, 1, 51, 1)), rewards, [[50], [50]])
    for position in ((0, 1, 2), (0, 1, 2), (1, 1, 2), (0, 2, 2), (0, 1, 3)):
        infer_tasks(spy, NOTHING, [same], num_transitions=10, position=position)
    drawn = [tuple(values) for values in spy.rewards()]
    assert drawn[:2] == drawn[2:4]
    assert len(set(drawn)) == 8


def test_a_belief_does_not_depend_on_other_tasks(batch, rounds):
    """With PEARL's own encoder, bit for bit: beside none, and beside other episodes of the other task."""
    algorithm = PEARL(latent_size=2, encoder_hidden_sizes=(8,), critic_hidden_sizes=(8,)).build(ProcessingConfig())
    learner = algorithm.initialize(OffPolicyPolicy(1, 1, 0, PolicyConfig(hidden_sizes=(8,))), run_seed=0)
    both = infer_tasks(algorithm, learner, rounds).params
    own = [counting(batch, [[[1, 2, 0], [3, 0, 0]]], [[2, 1]]), counting(batch, [[[4, 5, 6]]], [[3]])]
    alone = infer_tasks(algorithm, learner, own).params
    for episodes in rounds:
        episodes.rewards[1] = 1e3
    beside_another = infer_tasks(algorithm, learner, rounds).params
    for name in ("belief.mean", "belief.variance"):
        np.testing.assert_array_equal(both[name][:1], alone[name])
        np.testing.assert_array_equal(both[name][0], beside_another[name][0])
        assert (both[name][1] != beside_another[name][1]).all()


BIAS = "policy_network.output.bias"
PARAMS = TaskParams({BIAS: np.zeros((2, 3), np.float32), "belief.mean": np.full((2, 1), 0.5, np.float32)})


def evaluation_of(spy: Spy, first_inference: int = 1):
    return by_inference(spy, NOTHING, first_inference=first_inference, context_rewards=None)


def test_the_context_of_an_evaluation_grows_by_every_round(spy, rounds):
    adapted, params = evaluation_of(spy), PARAMS
    for k, episodes in enumerate(rounds):
        params = adapted(k, params, episodes)
        assert list(params.params) == [*PARAMS.params, "belief.variance"]
        assert params.params[BIAS] is PARAMS.params[BIAS]
    assert spy.rewards()[::2] == [[1, 2, 3], [1, 2, 3, 4, 5, 6]]
    assert params.params["belief.mean"].tolist() == [[21], [-21]]


@pytest.mark.parametrize(("first_inference", "inferred"), [(1, (True, True)), (3, (False, True)), (4, (False, False))])
def test_nothing_is_inferred_until_there_are_enough_episodes_of_a_task(spy, rounds, first_inference, inferred):
    adapted = evaluation_of(spy, first_inference)
    for k, episodes in enumerate(rounds):
        assert (adapted(k, PARAMS, episodes) is not PARAMS) == inferred[k]


def test_an_evaluation_knows_nothing_of_another(spy, rounds):
    evaluation_of(spy)(0, PARAMS, rounds[0])
    evaluation_of(spy)(0, PARAMS, rounds[1])
    assert spy.rewards()[2:] == [[4, 5, 6], [-6]]

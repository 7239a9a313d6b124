"""What a run keeps in memory of its stored batches, and which training tasks it can do that with."""

import numpy as np
import pytest
from small_runs import SMALL_RUNS

from metaloom.flows.recipes import new_config
from metaloom.pipeline.building import setup_of
from metaloom.pipeline.dataflow.refs import StageRef
from metaloom.pipeline.envs.contract import EnvError
from metaloom.pipeline.envs.registry import make_env
from metaloom.pipeline.estimation.trials import Trials
from metaloom.pipeline.schema import ConfigError
from metaloom.pipeline.types import EpisodeBatch
from metaloom.stages.graphs.task_inference import check_tasks
from metaloom.stages.memory.replay import (
    StoredTrials,
    replay_of_all_tasks,
    replay_of_one_task,
    training_tasks,
    trials_of_run,
)


class Batches:
    """A batch of two tasks' two episodes in every iteration of a span; counts what is read of it."""

    def __init__(self, first, last):
        self.refs_in_order = [StageRef(i, "collect_rollouts") for i in range(first, last + 1)]
        self.span, self.read = self, []
        self.first, self.last = first, last

    def __contains__(self, ref):
        return ref in self.refs_in_order

    def refs(self, i):
        return [ref for ref in self.refs_in_order if ref.iteration == i]

    def lengths(self, ref):
        return self._batch(ref).lengths

    def experience(self, ref):
        self.read.append(ref.iteration)
        return self._batch(ref)

    def _batch(self, ref):
        shape = (2, 2, 3)
        return EpisodeBatch(
            observations=np.zeros((2, 2, 4, 1), np.float32),
            actions=np.zeros((*shape, 1), np.float32),
            rewards=np.full(shape, ref.iteration, np.float32),
            terminated=np.zeros((2, 2), bool),
            truncated=np.ones((2, 2), bool),
            lengths=np.full((2, 2), 3, np.int32),
            behavior={},
            reward_terms={},
            initial_state=np.zeros((2, 2, 1)),
        )


EACH = Trials(Batches(0, 0).experience(StageRef(0, "collect_rollouts")), 2, 0).num_bytes


@pytest.mark.parametrize(
    ("room", "read"),
    [
        (2 * EACH, [0, 1, 2, 2, 2]),
        (2 * EACH - 1, [0, 1, 2, 1, 2, 1, 2]),
        (3 * EACH, [0, 1, 2]),
        (0, [0, 1, 2] * 3),
    ],
)
def test_trials_are_read_once_while_they_fit_into_memory(room, read):
    memory, batches = StoredTrials(2, 0, room), Batches(0, 2)
    for _ in range(3):
        taken = memory.buffer(batches).take(np.arange(0, 6, 2))
        assert [trials.rewards[place, 0] for trials, place in taken] == [0, 1, 2]
    assert batches.read == read


def test_trials_of_iterations_that_are_no_more_learned_from_make_room():
    memory, first, later = StoredTrials(2, 0, 2 * EACH), Batches(0, 1), Batches(1, 2)
    memory.buffer(first).take(np.arange(4))
    for _ in range(2):
        buffer = memory.buffer(later)
        assert len(buffer) == 4
        buffer.take(np.arange(4))
    assert (first.read, later.read) == ([0, 1], [2])


def test_the_memory_for_trials_is_set_in_mebibytes():
    config = new_config(SMALL_RUNS["varibad"][0], (*SMALL_RUNS["varibad"][1:], "replay.cache_mib=3"))
    memory = trials_of_run(config, setup_of(config, make_env(config.env)))
    assert (memory._room, memory._episodes_per_trial, memory._num_actions) == (3 * 2**20, config.algorithm.trial, 0)


def pearl(*changes):
    config = new_config("pearl-point-robot", (*SMALL_RUNS["pearl"][1:], *changes))
    return config, make_env(config.env)


def test_as_many_training_tasks_as_there_are_can_be_collected_from_and_learned_from_at_once():
    size = len(pearl()[1].task_set)
    check_tasks(*pearl(f"num_tasks={size}", f"algorithm.meta_batch_size={size}"))
    for name in ("num_tasks", "algorithm.meta_batch_size"):
        with pytest.raises(ConfigError, match=rf"^{name} is {size + 1} but .* has {size} training tasks"):
            check_tasks(*pearl(f"{name}={size + 1}"))


def test_training_tasks_that_task_inference_cannot_take_are_refused():
    with pytest.raises(ConfigError, match="task_sampling must be uniform, got balanced: pearl draws"):
        check_tasks(*pearl("task_sampling=balanced"))
    with pytest.raises(EnvError, match="sparse"):
        check_tasks(*pearl("algorithm.sparse_rewards=true"))
    check_tasks(*pearl("algorithm.sparse_rewards=true", "env=pearl-sparse-point-robot"))


def test_a_replay_buffer_takes_the_memory_of_what_the_run_makes_and_half_of_its_limit_at_most():
    config, env = pearl("iterations=4", "algorithm.memory_size=1000")
    assert training_tasks(env).params.tolist() == [[*task] for task in env.task_set]
    setup, tasks = setup_of(config, env), len(env.task_set)
    plan = config.algorithm.plan(episodes_per_task=config.episodes_per_task, max_episode_steps=5)
    for replay, buffers in (
        (replay_of_all_tasks(config, setup, env), tasks),
        (replay_of_one_task(config, setup), 1),
    ):
        most = plan.most_transitions(iterations=4, num_tasks=2, all_tasks=buffers, max_episode_steps=5)
        assert len(replay._buffer._newest) == most
    config, _ = pearl("iterations=1000000", "algorithm.memory_size=1000000", "replay.cache_mib=1")
    row = 4 * (2 * setup.observation_size + setup.action_size + 2)
    assert len(replay_of_one_task(config, setup)._buffer._newest) == 2**20 // row // 2

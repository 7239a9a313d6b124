"""Replay buffer and trials backed by a run's rollout batches."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from metaloom.pipeline.algorithms.contract import Setup
from metaloom.pipeline.algorithms.off_policy.settings import OffPolicyPlan, OffPolicySettings
from metaloom.pipeline.config.run import RunConfig
from metaloom.pipeline.dataflow.outputs import SpanOutputs
from metaloom.pipeline.dataflow.refs import StageRef
from metaloom.pipeline.envs.contract import MetaEnv
from metaloom.pipeline.estimation.trials import Trials
from metaloom.pipeline.replay.buffer import ReplayBuffer, TransitionColumns
from metaloom.pipeline.replay.index import ReplayView, TaskIndex, TrialBuffer
from metaloom.pipeline.tasks.samplers import TaskPool, fixed_tasks
from metaloom.pipeline.types import Array, Minibatch, Minibatches, TaskBatch

MIB = 2**20
BEFORE_ITERATIONS = -1  # iteration number of the replay buffer's initial fill


class Collected(NamedTuple):
    """Origin and use of a rollout batch."""

    iteration: int  # BEFORE_ITERATIONS for the initial fill
    task_ids: Array  # replay buffer index of each task's episodes, [B]
    in_context: bool  # the batch may be used to infer tasks


class StoredReplay:
    """Replay buffer over a run's rollout batches in collection order, extended on demand.

    Row indices need only episode lengths. Other stored arrays are read when their rows are drawn.
    """

    def __init__(self, buffer: ReplayBuffer) -> None:
        self._buffer = buffer
        self._tasks = TaskIndex()
        self._rounds: list[tuple[StageRef, Array]] = []
        self._next_iteration = 0

    def view(self, rounds: SpanOutputs, collected: Callable[[StageRef, int], Collected]) -> ReplayView:
        """Return the replay buffer as of the last iteration in a span of rollout batches."""
        self._count(rounds)
        for ref, lengths in self._rounds[len(self._tasks) :]:
            if ref.iteration > rounds.span.last:
                break
            iteration, task_ids, in_context = collected(ref, len(lengths))
            self._tasks.append(iteration, task_ids, lengths, in_context=in_context)
        return self._tasks.as_of(rounds.span.last)

    def minibatches(self, rounds: SpanOutputs, drawn: Minibatches) -> Iterator[Minibatch]:
        """Yield the minibatches of an iteration's gradient steps. Only rollout batches with drawn rows are read."""
        self._count(rounds)
        for _, lengths in self._rounds[len(self._buffer.rows) :]:
            self._buffer.append(lengths)
        return self._buffer.minibatches(drawn, lambda number: rounds.experience(self._rounds[number][0]))

    def _count(self, rounds: SpanOutputs) -> None:
        for iteration in range(self._next_iteration, rounds.span.last + 1):
            self._rounds += [(ref, rounds.lengths(ref)) for ref in rounds.refs(iteration)]
            self._next_iteration = iteration + 1


def plan_of(config: RunConfig) -> OffPolicyPlan:
    """Return the plan for a run's rollouts and gradient steps."""
    assert isinstance(config.algorithm, OffPolicySettings), "a graph for other algorithms"
    return config.algorithm.plan(episodes_per_task=config.episodes_per_task, max_episode_steps=config.max_episode_steps)


def training_tasks(env: MetaEnv) -> TaskBatch:
    return TaskPool.of(env, fixed_tasks(env)).all()


def replay_of_one_task(config: RunConfig, setup: Setup) -> StoredReplay:
    return _replay(config, setup, 1)


def replay_of_all_tasks(config: RunConfig, setup: Setup, env: MetaEnv) -> StoredReplay:
    """Return an empty replay buffer with a separate part per training task."""
    return _replay(config, setup, len(fixed_tasks(env)))


def _replay(config: RunConfig, setup: Setup, num_buffers: int) -> StoredReplay:
    most_rows = plan_of(config).most_transitions(
        iterations=config.iterations,
        num_tasks=config.num_tasks,
        all_tasks=num_buffers,
        max_episode_steps=config.max_episode_steps,
    )
    columns = TransitionColumns(setup.observation_size, setup.action_size)
    return StoredReplay(ReplayBuffer(columns, cache_bytes=config.replay.cache_mib * MIB, max_rows=most_rows))


class StoredTrials:
    """Trials of a run's rollout batches, cached in memory while in use and within a size limit.

    `num_actions` is 0 for continuous actions; `cache_bytes` does not count the batch being read.
    """

    def __init__(self, episodes_per_trial: int, num_actions: int, cache_bytes: int) -> None:
        self._episodes_per_trial, self._num_actions, self._room = episodes_per_trial, num_actions, cache_bytes
        self._known: dict[StageRef, Trials] = {}

    def buffer(self, rounds: SpanOutputs) -> TrialBuffer:
        """Return the trials of a span of rollout batches. Only episode lengths are read immediately."""
        refs = [ref for i in range(rounds.span.first, rounds.span.last + 1) for ref in rounds.refs(i)]
        self._known = {ref: trials for ref, trials in self._known.items() if ref in rounds.span}
        counts = [rounds.lengths(ref).size // self._episodes_per_trial for ref in refs]
        return TrialBuffer(counts, lambda n: self._read(rounds, refs[n]))

    def _read(self, rounds: SpanOutputs, ref: StageRef) -> Trials:
        if ref not in self._known:
            trials = Trials(rounds.experience(ref), self._episodes_per_trial, self._num_actions)
            if sum(known.num_bytes for known in self._known.values()) + trials.num_bytes > self._room:
                return trials
            self._known[ref] = trials
        return self._known[ref]


def trials_of_run(config: RunConfig, setup: Setup) -> StoredTrials:
    assert config.algorithm.trial is not None, "a graph for algorithms that adapt within a trial"
    return StoredTrials(config.algorithm.trial, setup.num_actions, config.replay.cache_mib * MIB)

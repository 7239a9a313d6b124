"""Act in the environments: complete episodes of every task."""

from dataclasses import replace
from functools import partial
from typing import Protocol

import numpy as np
from gymnasium.spaces import Discrete

from pipeline.envs import EnvConfig, make_batch_env, make_env
from pipeline.envs.contract import BatchEnv, BatchStep, EnvError
from pipeline.envs.loop_batch import LoopBatch
from pipeline.policies.acting import CategoricalActor, GaussianActor, check_actor_params
from pipeline.policies.config import PolicyConfig
from pipeline.seeding import generator
from pipeline.types import Array, EpisodeBatch, TaskBatch, TaskParams
from stages.episode_blocks import Enough, collect_until
from stages.rollout_faults import Circumstances, RolloutError, RolloutPosition, not_finite

__all__ = [
    "UNWATCHED",
    "RolloutError",
    "RolloutPosition",
    "RolloutWatch",
    "Sampler",
    "Unwatched",
    "collect_rollouts",
]


class RolloutWatch(Protocol):
    """Is told where a rollout is, so that it can be known if the process does not live to tell."""

    def actions(self, shape: tuple[int, int, int]) -> Array:
        """Zeros [T, N, A] float32, into which the rollout writes its actions; it copies them when it has ended."""
        ...

    def entered(self, env_step: int | None) -> None:
        """The environments are about to be reset (None) or to take a step."""
        ...

    def row(self, row: int) -> None:
        """The environment of a row is about to be called, where a loop calls one after the other."""
        ...


class Unwatched:
    """Nobody watches."""

    def actions(self, shape: tuple[int, int, int]) -> Array:
        """Zeros of this shape."""
        return np.zeros(shape, np.float32)

    def entered(self, env_step: int | None) -> None:
        """Nothing to note."""

    def row(self, row: int) -> None:
        """Nothing to note."""


UNWATCHED = Unwatched()


class Sampler:
    """Simulators for a run's rollouts, kept warm between calls. One per thread: not safe to share."""

    _KEPT = 4

    def __init__(
        self,
        env: EnvConfig,
        policy: PolicyConfig,
        *,
        episodes_per_task: int,
        max_episode_steps: int,
        num_threads: int = 1,
        deterministic: bool = False,
        enough: Enough | None = None,
    ) -> None:
        self.policy = policy
        self.deterministic = deterministic
        self.enough = enough
        self.episodes_at_once = episodes_per_task if enough is None else enough.block_size
        self.episodes_per_task = episodes_per_task
        self.max_episode_steps = max_episode_steps
        self.env = env
        self._num_threads = num_threads
        self._batches: dict[int, BatchEnv] = {}
        self._num_choices: int | None = None

    @property
    def num_choices(self) -> int:
        """Actions to choose from; 0 where actions are numbers."""
        if self._num_choices is None:
            env = make_env(self.env)
            self._num_choices = int(env.action_space.n) if isinstance(env.action_space, Discrete) else 0
            env.close()
        return self._num_choices

    def batch(self, num_tasks: int, watch: RolloutWatch = UNWATCHED) -> BatchEnv:
        """The simulators for shards of this many tasks, made on first use; the last four sizes are kept."""
        batch = self._batches.pop(num_tasks, None)
        if batch is None:
            batch = make_batch_env(self.env, num_tasks * self.episodes_at_once, self._num_threads, watch.row)
        if isinstance(batch, LoopBatch):
            batch.watch_row = watch.row
        self._batches[num_tasks] = batch
        while len(self._batches) > self._KEPT:
            self._batches.pop(next(iter(self._batches))).close()
        return batch

    def close(self) -> None:
        """Free the simulators."""
        for batch in self._batches.values():
            batch.close()
        self._batches.clear()


def collect_rollouts(
    sampler: Sampler,
    params: TaskParams,
    tasks: TaskBatch,
    *,
    position: RolloutPosition,
    watch: RolloutWatch = UNWATCHED,
) -> EpisodeBatch:
    """Complete episodes of every task, under the task's own parameters: exactly E, or until there are enough.

    The bits of an episode depend on its task, its parameters and its position only: not on how tasks are split into
    shards, on threads, or on when other episodes end.

    Raises:
        RolloutError: the environment failed, or an observation, action or reward is not finite.
        EnvError: the environment cannot be made.
        ValueError: the parameters do not fit the environment.
    """
    if sampler.enough is None:
        return _collect_together(sampler, params, tasks, position, watch)
    # Task by task, since each needs a number of blocks of its own.
    return EpisodeBatch.concatenate(
        [
            collect_until(sampler.enough, partial(_collect_block, sampler, params, tasks, position, watch, b))
            for b in range(len(tasks))
        ]
    )


def _collect_block(
    sampler: Sampler,
    params: TaskParams,
    tasks: TaskBatch,
    position: RolloutPosition,
    watch: RolloutWatch,
    b: int,
    first_episode: int,
) -> EpisodeBatch:
    """The episodes of task b from a place on, as many as are sampled at once."""
    at = replace(position, first_task=position.first_task + b, first_episode=first_episode)
    return _collect_together(sampler, params.slice(b, b + 1), tasks.slice(b, b + 1), at, watch)


def _collect_together(
    sampler: Sampler, params: TaskParams, tasks: TaskBatch, position: RolloutPosition, watch: RolloutWatch
) -> EpisodeBatch:
    env = sampler.batch(len(tasks), watch)
    check_actor_params(sampler.policy, params.params, env.observation_size, env.action_size, sampler.num_choices)
    # Numbers that are too large are found at the end, and told better than by a warning.
    with np.errstate(over="ignore", invalid="ignore"):
        return _Rollout(sampler, env, params, tasks, position, watch).run()


class _Rollout:
    """One call's buffers, time leading so that every step writes one block: [T, N, ...] with N = B * E rows."""

    def __init__(
        self,
        sampler: Sampler,
        env: BatchEnv,
        params: TaskParams,
        tasks: TaskBatch,
        position: RolloutPosition,
        watch: RolloutWatch,
    ) -> None:
        B, E, T = len(tasks), sampler.episodes_at_once, sampler.max_episode_steps
        self.B, self.E, self.T, self.N = B, E, T, B * E
        self.env, self.tasks, self.position, self.watch = env, tasks, position, watch
        self.circumstances = Circumstances(sampler.env, tasks, position, E)
        self.observations = np.zeros((T + 1, B * E, env.observation_size), np.float32)
        self.taken = watch.actions((T, B * E, env.action_size))
        rngs = None
        if not sampler.deterministic:
            rngs = [generator(position.run_seed, "actions", *position.of_task(b)) for b in range(B)]
        actor = CategoricalActor if sampler.num_choices else GaussianActor
        self.actor = actor(sampler.policy, params, self.taken, E, rngs)
        self.rewards = np.zeros((T, B * E), np.float32)
        self.terms: dict[str, Array] = {}
        self.lengths = np.zeros(B * E, np.int32)
        self.terminated = np.zeros(B * E, np.bool_)
        self.env_step: int | None = None

    def run(self) -> EpisodeBatch:
        try:
            initial_state = self._act_in_all()
        # Also an environment that calls sys.exit: it must not take the worker with it.
        except (Exception, SystemExit) as error:
            raise self.circumstances.fault_of(error, env_step=self.env_step, actions=self.taken) from error
        self._check_finite()
        return self._episodes(initial_state)

    def _act_in_all(self) -> Array:
        """Every episode from its reset to its end; the simulators' state after the resets."""
        self.watch.entered(None)
        first = self.env.reset(np.repeat(self.tasks.params, self.E, axis=0), self._seeds())
        _require_shape("reset: observations", first, self.observations[0].shape)
        self.observations[0] = first
        initial_state = self.env.state
        rows = np.arange(self.N)
        for t in range(self.T):
            self.env_step = t
            actions = self.actor.act(t, self.observations[t], rows)
            self.watch.entered(t)
            result = self.env.step(actions, rows)
            self._record(t, rows, result)
            ended = result.terminated | result.truncated
            if ended.any():
                rows = rows[~ended]
                if not len(rows):
                    break
        return initial_state

    def _seeds(self) -> Array:
        seeds = [self.position.reset_seed(b, e) for b in range(self.B) for e in range(self.E)]
        return np.array(seeds, np.uint64)

    def _record(self, t: int, rows: Array, result: BatchStep) -> None:
        at: Array | slice = slice(None) if len(rows) == self.N else rows
        _require_shape("step: observations", result.observations, (len(rows), self.observations.shape[2]))
        if t == 0:
            self.terms = {name: np.zeros((self.T, self.N), np.float32) for name in result.reward_terms}
        self.observations[t + 1, at] = result.observations
        self.rewards[t, at] = sum(result.reward_terms.values())
        for name, term in result.reward_terms.items():
            self.terms[name][t, at] = term
        self.lengths[at] += 1
        self.terminated[at] = result.terminated

    def _episodes(self, initial_state: Array) -> EpisodeBatch:
        terminated = self.terminated.reshape(self.B, self.E)
        return EpisodeBatch(
            observations=self._by_task(self.observations),
            actions=self._by_task(self.actor.actions),
            rewards=self._by_task(self.rewards),
            terminated=terminated,
            # Every episode is complete, so what the task did not end, a time limit did.
            truncated=~terminated,
            lengths=self.lengths.reshape(self.B, self.E),
            behavior={name: self._by_task(value) for name, value in self.actor.behavior_by_step.items()}
            | self.actor.behavior_by_task,
            reward_terms={name: self._by_task(term) for name, term in self.terms.items()},
            initial_state=initial_state.reshape(self.B, self.E, -1),
        )

    def _check_finite(self) -> None:
        """The last line of defence: batched environments are not checked step by step."""
        for name, array in (("observations", self.observations), ("actions", self.taken), ("rewards", self.rewards)):
            finite = np.isfinite(array)
            if not finite.all():
                t, row, *_ = np.argwhere(~finite)[0].tolist()
                # An observation belongs to the step that led to it.
                env_step = t - 1 if name == "observations" else t
                call = "act" if name == "actions" else "step" if env_step >= 0 else "reset"
                raise self.circumstances.fault(
                    not_finite(name), call, "", row, env_step=env_step if env_step >= 0 else None, actions=self.taken
                )

    def _by_task(self, values: Array) -> Array:
        """[B, E, T, ...] from [T, N, ...]."""
        split = values.reshape(len(values), self.B, self.E, *values.shape[2:])
        # Always a copy: where there is one row, the order is the same already, and the actions are the watch's.
        return np.array(np.moveaxis(split, 0, 2), order="C")


def _require_shape(name: str, found: Array, required: tuple[int, ...]) -> None:
    # NumPy would spread a smaller array over the rows.
    if found.shape != required:
        raise EnvError(f"{name}: found shape {found.shape}; required {required}")

"""Act in the environments: E complete episodes of every task."""

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from gymnasium.spaces import Discrete

from pipeline.envs import EnvConfig, make_batch_env, make_env
from pipeline.envs.contract import BatchEnv, BatchStep
from pipeline.policies.acting import CategoricalActor, GaussianActor, check_actor_params
from pipeline.policies.config import PolicyConfig
from pipeline.seeding import generator, seed_for
from pipeline.types import Array, EpisodeBatch, TaskBatch, TaskParams
from stages.episode_blocks import Enough, collect_until
from stages.faults import StageFault


class RolloutError(StageFault):
    """A rollout gave numbers that are not finite; the message says in which task, episode and step."""


@dataclass(frozen=True)
class RolloutPosition:
    """Where a rollout stands in its run: with it, its random numbers are fixed.

    Attributes:
        run_seed: the run's seed.
        iteration: the iteration.
        step: inner step k.
        first_task: place of the shard's first task in the meta-batch.
        first_episode: place of the first episode among those of its task.
    """

    run_seed: int
    iteration: int
    step: int
    first_task: int = 0
    first_episode: int = 0

    def of_task(self, b: int) -> tuple[int, ...]:
        """Where the shard's task b draws its actions from."""
        place = (self.iteration, self.step, self.first_task + b)
        return (*place, self.first_episode) if self.first_episode else place


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
        enough: Enough | None = None,
    ) -> None:
        self.policy = policy
        self.enough = enough
        self.episodes_at_once = episodes_per_task if enough is None else enough.block_size
        self.episodes_per_task = episodes_per_task
        self.max_episode_steps = max_episode_steps
        self._env = env
        self._num_threads = num_threads
        self._batches: dict[int, BatchEnv] = {}
        self._num_choices: int | None = None

    @property
    def num_choices(self) -> int:
        """Actions to choose from; 0 where actions are numbers."""
        if self._num_choices is None:
            env = make_env(self._env)
            self._num_choices = int(env.action_space.n) if isinstance(env.action_space, Discrete) else 0
            env.close()
        return self._num_choices

    def batch(self, num_tasks: int) -> BatchEnv:
        """The simulators for shards of this many tasks, made on first use; the last four sizes are kept."""
        batch = self._batches.pop(num_tasks, None)
        if batch is None:
            batch = make_batch_env(self._env, num_tasks * self.episodes_at_once, self._num_threads)
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
    sampler: Sampler, params: TaskParams, tasks: TaskBatch, *, position: RolloutPosition
) -> EpisodeBatch:
    """Complete episodes of every task, under the task's own parameters: exactly E, or until there are enough.

    The bits of an episode depend on its task, its parameters and its position only: not on how tasks are split into
    shards, on threads, or on when other episodes end.

    Raises:
        RolloutError: an observation, action or reward is not finite.
        ValueError: the parameters do not fit the environment.
    """
    if sampler.enough is None:
        return _collect_together(sampler, params, tasks, position)
    # Task by task, since each needs a number of blocks of its own.
    return EpisodeBatch.concatenate(
        [
            collect_until(sampler.enough, partial(_collect_block, sampler, params, tasks, position, b))
            for b in range(len(tasks))
        ]
    )


def _collect_block(
    sampler: Sampler, params: TaskParams, tasks: TaskBatch, position: RolloutPosition, b: int, first_episode: int
) -> EpisodeBatch:
    """The episodes of task b from a place on, as many as are sampled at once."""
    at = replace(position, first_task=position.first_task + b, first_episode=first_episode)
    return _collect_together(sampler, params.slice(b, b + 1), tasks.slice(b, b + 1), at)


def _collect_together(
    sampler: Sampler, params: TaskParams, tasks: TaskBatch, position: RolloutPosition
) -> EpisodeBatch:
    env = sampler.batch(len(tasks))
    check_actor_params(sampler.policy, params.params, env.observation_size, env.action_size, sampler.num_choices)
    episodes = _Rollout(sampler, env, params, tasks, position).run()
    _check_finite(episodes, position)
    return episodes


class _Rollout:
    """One call's buffers, time leading so that every step writes one block: [T, N, ...] with N = B * E rows."""

    def __init__(
        self, sampler: Sampler, env: BatchEnv, params: TaskParams, tasks: TaskBatch, position: RolloutPosition
    ) -> None:
        B, E, T = len(tasks), sampler.episodes_at_once, sampler.max_episode_steps
        self.B, self.E, self.T, self.N = B, E, T, B * E
        self.env, self.tasks, self.position = env, tasks, position
        rngs = [generator(position.run_seed, "actions", *position.of_task(b)) for b in range(B)]
        actor = CategoricalActor if sampler.num_choices else GaussianActor
        self.actor = actor(sampler.policy, params, T, E, rngs)
        self.observations = np.zeros((T + 1, B * E, env.observation_size), np.float32)
        self.rewards = np.zeros((T, B * E), np.float32)
        self.terms: dict[str, Array] = {}
        self.lengths = np.zeros(B * E, np.int32)
        self.terminated = np.zeros(B * E, np.bool_)

    def run(self) -> EpisodeBatch:
        self.observations[0] = self.env.reset(np.repeat(self.tasks.params, self.E, axis=0), self._seeds())
        initial_state = self.env.state
        rows = np.arange(self.N)
        for t in range(self.T):
            result = self.env.step(self.actor.act(t, self.observations[t], rows), rows)
            self._record(t, rows, result)
            ended = result.terminated | result.truncated
            if ended.any():
                rows = rows[~ended]
                if not len(rows):
                    break
        return self._episodes(initial_state)

    def _seeds(self) -> Array:
        at = self.position
        seeds = [
            seed_for(at.run_seed, "resets", at.iteration, at.step, at.first_task + b, at.first_episode + e)
            for b in range(self.B)
            for e in range(self.E)
        ]
        return np.array(seeds, np.uint64)

    def _record(self, t: int, rows: Array, result: BatchStep) -> None:
        at: Array | slice = slice(None) if len(rows) == self.N else rows
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

    def _by_task(self, values: Array) -> Array:
        """[B, E, T, ...] from [T, N, ...]."""
        split = values.reshape(len(values), self.B, self.E, *values.shape[2:])
        return np.ascontiguousarray(np.moveaxis(split, 0, 2))


def _check_finite(episodes: EpisodeBatch, position: RolloutPosition) -> None:
    for name in ("observations", "actions", "rewards"):
        finite = np.isfinite(getattr(episodes, name))
        if not finite.all():
            b, e, t, *_ = np.argwhere(~finite)[0].tolist()
            raise RolloutError(
                f"collect_rollouts, iteration {position.iteration}, step {position.step}: {name} of task "
                f"{position.first_task + b}, episode {e} are not finite from step {t} on; required finite numbers. "
                "Look at that episode's environment and at the policy's parameters"
            )

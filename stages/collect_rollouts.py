"""Act in the environments: E complete episodes of every task."""

from dataclasses import dataclass

import numpy as np

from pipeline.envs import EnvConfig, make_batch_env
from pipeline.envs.contract import BatchEnv, BatchStep
from pipeline.policies.config import PolicyConfig
from pipeline.policies.inference import GaussianInference, check_params
from pipeline.seeding import generator, seed_for
from pipeline.types import Array, EpisodeBatch, TaskBatch, TaskParams
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
    """

    run_seed: int
    iteration: int
    step: int
    first_task: int = 0


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
    ) -> None:
        self.policy = policy
        self.deterministic = deterministic
        self.episodes_per_task = episodes_per_task
        self.max_episode_steps = max_episode_steps
        self._env = env
        self._num_threads = num_threads
        self._batches: dict[int, BatchEnv] = {}

    def batch(self, num_tasks: int) -> BatchEnv:
        """The simulators for shards of this many tasks, made on first use; the last four sizes are kept."""
        batch = self._batches.pop(num_tasks, None)
        if batch is None:
            batch = make_batch_env(self._env, num_tasks * self.episodes_per_task, self._num_threads)
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
    """Exactly E complete episodes of every task, under the task's own parameters.

    The bits of an episode depend on its task, its parameters and its position only: not on how tasks are split into
    shards, on threads, or on when other episodes end.

    Raises:
        RolloutError: an observation, action or reward is not finite.
        ValueError: the parameters do not fit the environment.
    """
    env = sampler.batch(len(tasks))
    check_params(sampler.policy, params.params, env.observation_size, env.action_size)
    episodes = _Rollout(sampler, env, params, tasks, position).run()
    _check_finite(episodes, position)
    return episodes


class _Rollout:
    """One call's buffers, time leading so that every step writes one block: [T, N, ...] with N = B * E rows."""

    def __init__(
        self, sampler: Sampler, env: BatchEnv, params: TaskParams, tasks: TaskBatch, position: RolloutPosition
    ) -> None:
        B, E, T = len(tasks), sampler.episodes_per_task, sampler.max_episode_steps
        self.B, self.E, self.T, self.N = B, E, T, B * E
        self.env, self.tasks, self.position = env, tasks, position
        self.policy = GaussianInference(sampler.policy, params, E)
        self.deterministic = sampler.deterministic
        self.observations = np.zeros((T + 1, B * E, env.observation_size), np.float32)
        self.actions = np.zeros((T, B * E, env.action_size), np.float32)
        self.means = np.zeros((T, B * E, env.action_size), np.float32)
        self.rewards = np.zeros((T, B * E), np.float32)
        self.terms: dict[str, Array] = {}
        self.lengths = np.zeros(B * E, np.int32)
        self.terminated = np.zeros(B * E, np.bool_)

    def run(self) -> EpisodeBatch:
        noise = self._noise()
        self.observations[0] = self.env.reset(np.repeat(self.tasks.params, self.E, axis=0), self._seeds())
        initial_state = self.env.state
        rows = np.arange(self.N)
        for t in range(self.T):
            result = self.env.step(self._act(t, rows, noise[t]), rows)
            self._record(t, rows, result)
            ended = result.terminated | result.truncated
            if ended.any():
                rows = rows[~ended]
                if not len(rows):
                    break
        return self._episodes(initial_state)

    def _noise(self) -> Array:
        """[T, B, E, A] float32, drawn per task before the first step, so that no episode's end shifts another's."""
        if self.deterministic:
            return np.zeros((self.T, self.B, self.E, self.env.action_size), np.float32)
        noise = np.empty((self.T, self.B, self.E, self.env.action_size), np.float32)
        at = self.position
        for b in range(self.B):
            rng = generator(at.run_seed, "actions", at.iteration, at.step, at.first_task + b)
            noise[:, b] = rng.standard_normal((self.T, self.E, self.env.action_size), np.float32)
        noise *= np.exp(self.policy.log_std)[:, None, :]
        return noise

    def _seeds(self) -> Array:
        at = self.position
        seeds = [
            seed_for(at.run_seed, "resets", at.iteration, at.step, at.first_task + b, e)
            for b in range(self.B)
            for e in range(self.E)
        ]
        return np.array(seeds, np.uint64)

    def _act(self, t: int, rows: Array, noise: Array) -> Array:
        """[n, A], the actions of the rows; ended episodes take part in the matrix products to keep their shapes."""
        self.policy.inputs[:] = self.observations[t].reshape(self.B, self.E, -1)
        mean = self.policy.mean()
        if len(rows) == self.N:
            self.means[t].reshape(mean.shape)[:] = mean
            np.add(mean, noise, out=self.actions[t].reshape(mean.shape))
            return self.actions[t]
        mean, noise = mean.reshape(self.N, -1)[rows], noise.reshape(self.N, -1)[rows]
        self.means[t, rows] = mean
        self.actions[t, rows] = actions = mean + noise
        return actions

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
            actions=self._by_task(self.actions),
            rewards=self._by_task(self.rewards),
            terminated=terminated,
            # Every episode is complete, so what the task did not end, a time limit did.
            truncated=~terminated,
            lengths=self.lengths.reshape(self.B, self.E),
            behavior={"mean": self._by_task(self.means), "log_std": np.ascontiguousarray(self.policy.log_std)},
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

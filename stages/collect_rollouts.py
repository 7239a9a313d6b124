"""Act in the environments: E complete episodes of every task."""

from typing import Protocol

import numpy as np

from pipeline.envs import EnvConfig, make_batch_env
from pipeline.envs.contract import BatchEnv, BatchStep, EnvError
from pipeline.envs.loop_batch import LoopBatch
from pipeline.policies.config import PolicyConfig
from pipeline.policies.inference import GaussianInference, check_params
from pipeline.seeding import generator
from pipeline.types import Array, EpisodeBatch, TaskBatch, TaskParams
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
    ) -> None:
        self.policy = policy
        self.deterministic = deterministic
        self.episodes_per_task = episodes_per_task
        self.max_episode_steps = max_episode_steps
        self.env = env
        self._num_threads = num_threads
        self._batches: dict[int, BatchEnv] = {}

    def batch(self, num_tasks: int, watch: RolloutWatch = UNWATCHED) -> BatchEnv:
        """The simulators for shards of this many tasks, made on first use; the last four sizes are kept."""
        batch = self._batches.pop(num_tasks, None)
        if batch is None:
            batch = make_batch_env(self.env, num_tasks * self.episodes_per_task, self._num_threads, watch.row)
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
    """Exactly E complete episodes of every task, under the task's own parameters.

    The bits of an episode depend on its task, its parameters and its position only: not on how tasks are split into
    shards, on threads, or on when other episodes end.

    Raises:
        RolloutError: the environment failed, or an observation, action or reward is not finite.
        EnvError: the environment cannot be made.
        ValueError: the parameters do not fit the environment.
    """
    env = sampler.batch(len(tasks), watch)
    check_params(sampler.policy, params.params, env.observation_size, env.action_size)
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
        B, E, T = len(tasks), sampler.episodes_per_task, sampler.max_episode_steps
        self.B, self.E, self.T, self.N = B, E, T, B * E
        self.env, self.tasks, self.position, self.watch = env, tasks, position, watch
        self.circumstances = Circumstances(sampler.env, tasks, position, E)
        self.policy = GaussianInference(sampler.policy, params, E)
        self.deterministic = sampler.deterministic
        self.observations = np.zeros((T + 1, B * E, env.observation_size), np.float32)
        self.actions = watch.actions((T, B * E, env.action_size))
        self.means = np.zeros((T, B * E, env.action_size), np.float32)
        self.rewards = np.zeros((T, B * E), np.float32)
        self.terms: dict[str, Array] = {}
        self.lengths = np.zeros(B * E, np.int32)
        self.terminated = np.zeros(B * E, np.bool_)
        self.env_step: int | None = None

    def run(self) -> EpisodeBatch:
        try:
            # Numbers that are too large are found below, and told better than by a warning.
            with np.errstate(over="ignore", invalid="ignore"):
                initial_state = self._act_in_all()
        # Also an environment that calls sys.exit: it must not take the worker with it.
        except (Exception, SystemExit) as error:
            raise self.circumstances.fault_of(error, env_step=self.env_step, actions=self.actions) from error
        self._check_finite()
        return self._episodes(initial_state)

    def _act_in_all(self) -> Array:
        """Every episode from its reset to its end; the simulators' state after the resets."""
        noise = self._noise()
        self.watch.entered(None)
        first = self.env.reset(np.repeat(self.tasks.params, self.E, axis=0), self._seeds())
        _require_shape("reset: observations", first, self.observations[0].shape)
        self.observations[0] = first
        initial_state = self.env.state
        rows = np.arange(self.N)
        for t in range(self.T):
            self.env_step = t
            actions = self._act(t, rows, noise[t])
            self.watch.entered(t)
            result = self.env.step(actions, rows)
            self._record(t, rows, result)
            ended = result.terminated | result.truncated
            if ended.any():
                rows = rows[~ended]
                if not len(rows):
                    break
        return initial_state

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
        seeds = [self.position.reset_seed(b, e) for b in range(self.B) for e in range(self.E)]
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

    def _check_finite(self) -> None:
        """The last line of defence: batched environments are not checked step by step."""
        for name, array in (("observations", self.observations), ("actions", self.actions), ("rewards", self.rewards)):
            finite = np.isfinite(array)
            if not finite.all():
                t, row, *_ = np.argwhere(~finite)[0].tolist()
                # An observation belongs to the step that led to it.
                env_step = t - 1 if name == "observations" else t
                call = "act" if name == "actions" else "step" if env_step >= 0 else "reset"
                raise self.circumstances.fault(
                    not_finite(name), call, "", row, env_step=env_step if env_step >= 0 else None, actions=self.actions
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

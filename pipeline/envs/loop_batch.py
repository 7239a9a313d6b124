"""The BatchEnv for environments that offer none: a loop over copies."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from gymnasium.spaces import Box

from pipeline.envs.contract import BatchStep, EnvError, MetaEnv
from pipeline.types import Array


class LoopBatch:
    """N copies of an environment, stepped one after the other. As slow as the environment, and as general."""

    def __init__(self, make: Callable[[], MetaEnv], num_rows: int) -> None:
        self._envs = [make() for _ in range(num_rows)]
        first = self._envs[0]
        self._name = type(first.unwrapped).__name__
        space = first.observation_space
        if not isinstance(space, Box):
            raise EnvError(
                f"{self._name} has the observation space {space}; required a Box. "
                "Wrap it, for example in gymnasium.wrappers.FlattenObservation"
            )
        self.num_rows = num_rows
        self.observation_size = int(np.prod(space.shape))
        self.action_size = int(np.prod(first.action_space.shape or ()))
        self._terms: tuple[str, ...] | None = None

    def reset(self, tasks: Array, seeds: Array) -> Array:
        observations = np.empty((self.num_rows, self.observation_size))
        for row, (env, task, seed) in enumerate(zip(self._envs, tasks, seeds.tolist(), strict=True)):
            env.set_task(task)
            observation, _ = env.reset(seed=seed)
            observations[row] = np.ravel(observation)
        return observations

    def step(self, actions: Array, rows: Array) -> BatchStep:
        n = len(rows)
        observations = np.empty((n, self.observation_size))
        terminated, truncated = np.empty(n, np.bool_), np.empty(n, np.bool_)
        terms: list[list[float]] = []
        for i, row in enumerate(rows.tolist()):
            observation, reward, terminated[i], truncated[i], info = self._envs[row].step(actions[i])
            observations[i] = np.ravel(observation)
            terms.append(self._read_terms(float(reward), info))
        columns = np.array(terms, np.float64).T
        return BatchStep(observations, dict(zip(self._terms or (), columns, strict=True)), terminated, truncated)

    def _read_terms(self, reward: float, info: Mapping[str, Any]) -> list[float]:
        terms = info.get("reward_terms", {"reward": reward})
        if self._terms is None:
            self._terms = tuple(terms)
        if terms.keys() != set(self._terms):
            raise EnvError(
                f'{self._name}.step: info["reward_terms"] has {sorted(terms)}; '
                f"required the same terms as in its first step, {sorted(self._terms)}"
            )
        values = [float(terms[name]) for name in self._terms]
        if not np.isclose(sum(values), reward, rtol=1e-6, atol=1e-6, equal_nan=True):
            raise EnvError(
                f'{self._name}.step: info["reward_terms"] sums to {sum(values)}, the reward is {reward}; '
                "required that the terms sum to the reward"
            )
        return values

    @property
    def state(self) -> Array:
        # gymnasium's MuJoCo envs show positions and velocities; others are restored by their reset seed alone.
        readers = [getattr(env.unwrapped, "state_vector", lambda: ()) for env in self._envs]
        return np.array([read() for read in readers], np.float64).reshape(self.num_rows, -1)

    def close(self) -> None:
        for env in self._envs:
            env.close()

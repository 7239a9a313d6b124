"""Bernoulli bandits: the simplest tasks that require exploration."""

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete

from metaloom.pipeline.envs.contract import BatchStep, EnvError, MetaEnv, RowBatch, TaskField, require_count
from metaloom.pipeline.envs.pictures import RenderedEnv, table_picture
from metaloom.pipeline.types import Array


class BernoulliBandit(RenderedEnv, MetaEnv):
    """Pull one of k arms, each of which pays 1 with a hidden probability (RL2's bandit problems).

    | observation | unit | | action | unit | range     |
    | ----------- | ---- |-| ------ | ---- | --------- |
    | nothing (0) | 1    | | arm    | 1    | 0 ... k-1 |

    | task field    | unit | distribution      |
    | ------------- | ---- | ----------------- |
    | p_0 ... p_k-1 | 1    | U(0, 1), each arm |

    Option `arms`: number of arms k, 5 by default. Reward term: payout = 1 with the arm's probability, else 0. Never
    terminates; max_episode_steps is the number of pulls. An episode's payouts depend only on its reset seed: pull t
    pays if the seed's t-th draw from U(0, 1) is below the arm's probability.
    """

    action_components: tuple[()] = ()

    def __init__(self, arms: int = 5) -> None:
        super().__init__()
        require_count(self, "arms", arms, least=2)
        self.task_fields: tuple[TaskField, ...] = tuple(
            TaskField(f"p_{n}", "1", f"probability that arm {n} pays") for n in range(arms)
        )
        self.observation_space: gymnasium.Space[Any] = Box(0, 1, (1,), np.float64)
        self.action_space: gymnasium.Space[Any] = Discrete(arms)
        self.observation_components: Sequence[tuple[str, str]] | None = (("nothing", "1"),)

    def sample_tasks(self, num_tasks: int, rng: np.random.Generator) -> Array:
        return rng.uniform(0, 1, (num_tasks, len(self.task_fields)))

    def set_task(self, task: Array) -> None:
        super().set_task(task)
        if not ((self.task >= 0) & (self.task <= 1)).all():
            raise EnvError(f"{type(self).__name__}.set_task: got {self.task.tolist()}; expected probabilities")

    def render(self) -> Any:
        """Return an image of each arm's probability and number of pulls, [height, width, 3] uint8."""
        return table_picture(self.task[None], np.bincount(self._actions, minlength=len(self.task))[None])

    def row_batch(self, num_rows: int, num_threads: int) -> "BanditBatch":
        return BanditBatch(num_rows)


class BanditBatch(RowBatch):
    observation_size = 1
    action_size = 1
    _DRAWN_AHEAD = 64

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self._generators: Sequence[np.random.Generator] = ()
        self._numbers = np.zeros((num_rows, self._DRAWN_AHEAD))
        self._pulls = np.zeros(num_rows, np.int64)

    def begin(self, rngs: Sequence[np.random.Generator]) -> Array:
        self._generators = rngs
        self._pulls[:] = 0
        return np.zeros((self.num_rows, 1))

    def step(self, actions: Array, rows: Array) -> BatchStep:
        # Drawing many values at once gives the same values as drawing them one by one.
        for row in rows[self._pulls[rows] % self._DRAWN_AHEAD == 0].tolist():
            self._numbers[row] = self._generators[row].random(self._DRAWN_AHEAD)
        numbers = self._numbers[rows, self._pulls[rows] % self._DRAWN_AHEAD]
        self._pulls[rows] += 1
        payouts = (numbers < self.tasks[rows, actions.reshape(-1)]).astype(np.float64)
        none = np.zeros(len(rows), np.bool_)
        return BatchStep(np.zeros((len(rows), 1)), {"payout": payouts}, none, none)

    @property
    def state(self) -> Array:
        # A bandit has no state: its payouts depend only on the reset seed.
        return np.zeros((self.num_rows, 0))

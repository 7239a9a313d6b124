"""Random tabular Markov decision processes, small enough to compute the best achievable return."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete

from metaloom.pipeline.envs.contract import BatchStep, EnvError, MetaEnv, RowBatch, TaskField, require_count
from metaloom.pipeline.envs.pictures import RenderedEnv, table_picture
from metaloom.pipeline.types import Array

_DRAWN_AHEAD = 32


class Tables(NamedTuple):
    """Mean rewards [..., S, A] and transition probabilities [..., S, A, S] of one MDP or of a batch [...] of MDPs."""

    means: Array
    transitions: Array


@lru_cache(maxsize=4096)
def draw_tables(number: int, num_states: int, num_actions: int) -> Tables:
    """Draw the MDP for a task number: mean rewards from N(1, 1), transition probabilities from Dirichlet(1)."""
    rng = np.random.Generator(np.random.PCG64(number))
    means = rng.normal(1, 1, (num_states, num_actions))
    return Tables(means, rng.dirichlet(np.ones(num_states), (num_states, num_actions)))


class TabularMDP(RenderedEnv, MetaEnv):
    """Act in a random MDP with hidden rewards and transition probabilities (RL2's tabular MDPs).

    | observation | unit | | action | unit | range                |
    | ----------- | ---- |-| ------ | ---- | -------------------- |
    | one-hot     | 1    | | choice | 1    | 0 ... `actions` - 1  |

    The one-hot vector is 1 at the index of the state.

    | task field | unit | distribution                                                                     |
    | ---------- | ---- | -------------------------------------------------------------------------------- |
    | mdp        | 1    | an integer below 2^53 that determines the MDP, see `draw_tables`                 |

    | reward term | value                                             |
    | ----------- | ------------------------------------------------- |
    | mean_reward | mean for the state and action, N(1, 1) over tasks |
    | noise       | N(0, 1), drawn at each step                       |

    Options `states` and `actions`: numbers of states and actions, default 10 and 5. Start: state 0. Never terminates;
    max_episode_steps is the horizon, 10 in RL2's experiments. All randomness in an episode comes from its reset seed.
    """

    action_components: tuple[()] = ()
    task_fields: tuple[TaskField] = (TaskField("mdp", "1", "number from which rewards and transitions are drawn"),)

    def __init__(self, states: int = 10, actions: int = 5) -> None:
        super().__init__()
        for name, number in (("states", states), ("actions", actions)):
            require_count(self, name, number, least=2)
        self.sizes: tuple[int, int] = (states, actions)
        self.observation_space: gymnasium.Space[Any] = Box(0, 1, (states,), np.float64)
        self.action_space: gymnasium.Space[Any] = Discrete(actions)
        self.observation_components: Sequence[tuple[str, str]] | None = tuple(
            (f"state_{n}", "1") for n in range(states)
        )

    def sample_tasks(self, num_tasks: int, rng: np.random.Generator) -> Array:
        return rng.integers(2**53, size=(num_tasks, 1)).astype(np.float64)

    def set_task(self, task: Array) -> None:
        super().set_task(task)
        number = float(self.task[0])
        if not (0 <= number < 2**53 and number.is_integer()):
            raise EnvError(f"{type(self).__name__}.set_task: got mdp {number}; expected an integer from 0 to 2^53 - 1")

    def render(self) -> Any:
        """Return an image of each action's mean reward and count in each state, [height, width, 3] uint8."""
        taken = np.zeros(self.sizes, np.int64)
        for seen, action in zip(self._seen, self._actions, strict=False):  # nothing follows the last observation
            taken[seen.argmax(), action] += 1
        return table_picture(draw_tables(int(self.task[0]), *self.sizes).means, taken)

    def row_batch(self, num_rows: int, num_threads: int) -> "TabularBatch":
        return TabularBatch(num_rows, *self.sizes)


class TabularBatch(RowBatch):
    action_size = 1

    def __init__(self, num_rows: int, num_states: int, num_actions: int) -> None:
        self.num_rows: int = num_rows
        self.observation_size: int = num_states
        self._sizes = num_states, num_actions
        self._unit = np.eye(num_states)
        self._states = np.zeros(num_rows, np.int64)
        self._steps = np.zeros(num_rows, np.int64)
        self._chances = np.zeros((num_rows, 2, _DRAWN_AHEAD))
        self._generators: Sequence[np.random.Generator] = ()

    def take(self, tasks: Array) -> None:
        # Rows with the same task share its tables.
        numbers, self._process = np.unique(tasks[:, 0], return_inverse=True)
        drawn = [draw_tables(int(number), *self._sizes) for number in numbers.tolist()]
        self._tables = Tables(np.stack([d.means for d in drawn]), np.stack([d.transitions for d in drawn]))

    def begin(self, rngs: Sequence[np.random.Generator]) -> Array:
        self._generators = rngs
        self._states[:] = 0
        self._steps[:] = 0
        return self._unit[self._states]

    def step(self, actions: Array, rows: Array) -> BatchStep:
        places = self._steps[rows] % _DRAWN_AHEAD
        for row in rows[places == 0].tolist():
            # Draw ahead for the next steps: uniform values for next states, and reward noise.
            rng = self._generators[row]
            self._chances[row] = rng.random(_DRAWN_AHEAD), rng.standard_normal(_DRAWN_AHEAD)
        self._steps[rows] += 1
        at = self._process[rows], self._states[rows], actions.reshape(-1)
        # Invert the cumulative distribution function. Its last value may be below 1 because of rounding, so the last
        # state takes the remainder.
        below = np.cumsum(self._tables.transitions[at], axis=1)
        self._states[rows] = (self._chances[rows, 0, places, None] >= below[:, :-1]).sum(1)
        terms = {"mean_reward": self._tables.means[at], "noise": self._chances[rows, 1, places]}
        none = np.zeros(len(rows), np.bool_)
        return BatchStep(self._unit[self._states[rows]], terms, none, none)

    @property
    def state(self) -> Array:
        return self._states[:, None].astype(np.float64)

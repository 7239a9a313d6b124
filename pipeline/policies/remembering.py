"""Acting with memory, which consists of a recurrent network's state and the last action, reward and episode end."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from metaloom.pipeline.nn.spec import Spaces
from metaloom.pipeline.policies import inference
from metaloom.pipeline.policies.config import PolicyConfig
from metaloom.pipeline.policies.inference import LOGITS_NETWORK, MEAN_NETWORK, Affine, cell_inference, check_shapes
from metaloom.pipeline.types import Array, EpisodeBatch, Params, Shapes, TaskParams

TRIAL_STATE, TRIAL_LAST = "trial.state", "trial.last"
"""Names of a task's initial memory in its parameters. Without these parameters, the memory starts empty."""


@dataclass(frozen=True)
class Memory:
    """Memory for B tasks x E rows."""

    state: Array  # recurrent state of the network, zero in a new trial, [B, E, S]
    last: Array  # last action (one-hot if discrete), reward and end of episode; zero in a new trial, [B, E, A + 2]

    def of_task(self) -> Params:
        """Return the memory of each task's first row as task parameters, [B, ...] each."""
        return {TRIAL_STATE: self.state[:, 0].copy(), TRIAL_LAST: self.last[:, 0].copy()}


class MemoryNetwork(Protocol):
    """Forward pass of a recurrent policy with state size S, for B tasks x E rows; see Inference."""

    state_size: int

    def step(self, inputs: Array, state: Array) -> tuple[Array, Array]:
        """Return outputs [B, E, A] and next states [B, E, S] for inputs [B, E, O + A + 2] and states [B, E, S]."""
        ...


MakeNetwork = Callable[[PolicyConfig, Spaces, TaskParams, int], MemoryNetwork]
"""Function that sets up a policy network's forward pass with parameters [B, ...] for E rows per task."""


class CellAndHead:
    """Recurrent cell with a dense output layer, as in RL2; see MemoryNetwork."""

    def __init__(self, config: PolicyConfig, spaces: Spaces, params: TaskParams, num_rows: int) -> None:
        self._cell = cell_inference(config.cell_spec(spaces), params.params)
        self._head = Affine(params.params, f"{policy_prefix(spaces)}.output")
        self.state_size: int = self._cell.state_size

    def step(self, inputs: Array, state: Array) -> tuple[Array, Array]:
        features, after = self._cell.step(inputs, state)
        return self._head(features), after


class Remembering:
    """Recurrent network with its memory, for B tasks x E rows. It is an Inference whose inputs are observations.

    `outputs` computes outputs for the current observations, `keep` stores the new state and actions of rows that
    continue, and `learn_of` stores the actions' outcomes. Rows that have ended only take part in matrix products.
    """

    def __init__(
        self,
        config: PolicyConfig,
        spaces: Spaces,
        params: TaskParams,
        num_rows: int,
        memory: Memory | None = None,
        network: MakeNetwork = CellAndHead,
    ) -> None:
        self.network: MemoryNetwork = network(config, spaces, params, num_rows)
        self.output_size: int = spaces.num_actions or spaces.action_size
        self._discrete = bool(spaces.num_actions)
        B, O = len(next(iter(params.params.values()))), spaces.observation_size
        self._inputs = np.zeros((B, num_rows, O + self.output_size + 2), np.float32)
        self.inputs: Array = self._inputs[..., :O]
        self._last = self._inputs[..., O:]
        self._state = np.zeros((B, num_rows, self.network.state_size), np.float32)
        self._next = self._state
        # Views with tasks and rows on one axis.
        self._last_rows = self._inputs.reshape(B * num_rows, -1)[:, O:]
        self._state_rows = self._state.reshape(B * num_rows, -1)
        own = params.params
        if memory is not None:
            self.memory = memory
        elif TRIAL_STATE in own:
            self.memory = Memory(own[TRIAL_STATE][:, None], own[TRIAL_LAST][:, None])

    @property
    def memory(self) -> Memory:
        """Copy of the current memory."""
        return Memory(self._state.copy(), self._last.copy())

    @memory.setter
    def memory(self, memory: Memory) -> None:
        self._state[:] = memory.state
        self._last[:] = memory.last

    def outputs(self) -> Array:
        outputs, self._next = self.network.step(self._inputs, self._state)
        return outputs

    def keep(self, rows: Array, actions: Array) -> None:
        """Store the actions [n, ...] taken in rows [n], and the states that the last `outputs` computed for them."""
        self._state_rows[rows] = self._next.reshape(self._state_rows.shape)[rows]
        taken = np.zeros((len(rows), self.output_size + 2), np.float32)
        if self._discrete:
            taken[np.arange(len(rows)), actions] = 1
        else:
            taken[:, :-2] = actions
        self._last_rows[rows] = taken

    def learn_of(self, rows: Array, rewards: Array, ended: Array) -> None:
        """Store the last reward of each row in `rows`, and whether its episode has ended, [n] each."""
        self._last_rows[rows, -2] = rewards
        self._last_rows[rows, -1] = ended


def policy_prefix(spaces: Spaces) -> str:
    """Return the policy network's prefix: the logits network for discrete actions, otherwise the mean network."""
    return LOGITS_NETWORK if spaces.num_actions else MEAN_NETWORK


def check_remembering(config: PolicyConfig, params: Params, spaces: Spaces) -> None:
    """Raise ValueError unless parameters [B, ...] match a policy with memory."""
    spec, A = config.cell_spec(spaces), spaces.num_actions or spaces.action_size
    cell = cell_inference(spec, params)
    required: Shapes = {
        **inference.shapes_of(spec),
        f"{policy_prefix(spaces)}.output.kernel": (cell.feature_size, A),
        f"{policy_prefix(spaces)}.output.bias": (A,),
    }
    if not spaces.num_actions:
        required["log_std"] = (A,)
    check_shapes(params, required | memory_shapes(params, cell.state_size, spaces))


def memory_shapes(params: Params, state_size: int, spaces: Spaces) -> Shapes:
    """Return the shapes of the tasks' initial memory, or {} if the parameters contain none."""
    if TRIAL_STATE not in params and TRIAL_LAST not in params:
        return {}
    return {TRIAL_STATE: (state_size,), TRIAL_LAST: ((spaces.num_actions or spaces.action_size) + 2,)}


def recollect(remembering: Remembering, observations: Array, actions: Array, rewards: Array, lengths: Array) -> Array:
    """Replay stored episodes [B, E, T] as if acting, and return the outputs [B, E, T, A].

    `remembering` starts with the memory from before the episodes and ends with the memory after them. With the same
    number of rows, outputs are bitwise identical to those in acting.
    """
    B, E, T = rewards.shape
    outputs = np.zeros((B, E, T, remembering.output_size), np.float32)
    flat_actions, flat_rewards = actions.reshape(B * E, *actions.shape[2:]), rewards.reshape(B * E, T)
    for t in range(int(lengths.max())):
        rows = np.flatnonzero(lengths.reshape(-1) > t)
        remembering.inputs[:] = observations[:, :, t]
        outputs[:, :, t] = remembering.outputs()
        remembering.keep(rows, flat_actions[rows, t])
        remembering.learn_of(rows, flat_rewards[rows, t], lengths.reshape(-1)[rows] == t + 1)
    return outputs


def remembered(remembering: Remembering, params: TaskParams, episodes: EpisodeBatch) -> TaskParams:
    """Return the parameters with each task's memory after its episodes [B, E, T], which are replayed in order."""
    for e in range(episodes.rewards.shape[1]):
        one = slice(e, e + 1)
        parts = (episodes.observations, episodes.actions, episodes.rewards, episodes.lengths)
        recollect(remembering, *(part[:, one] for part in parts))
    return TaskParams({**params.params, **remembering.memory.of_task()})

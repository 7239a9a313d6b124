"""The batches that stages hand to one another.

Axes: B tasks, E episodes per task, T steps (padded), O observation, A action, P task parameters, S simulator state.
The order [B, E, T, ...] never changes between stages. Padding is zero; `lengths` says where it starts.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Self, cast

import numpy as np
from numpy.typing import NDArray

from metaloom.pipeline.shown import Shown

Array = NDArray[Any]
Params = dict[str, Array]
Shapes = dict[str, tuple[int, ...]]
"""Shapes of a network's parameters by name, in order."""
Metrics = dict[str, float]

ParallelMap = Callable[..., Iterable[Any]]
"""The built-in `map` or an executor's `map`: calls may run in any order, results come in the order given."""


def _each_episode(dtype: type[np.generic]) -> dict[str, Any]:
    """Return the metadata of a field [B, E] of EpisodeBatch: one number per episode, or None if the default is None.

    Checks, tables and exports find the field by it, and the store keeps every field, as `storage.format.layout` plans.
    """
    return {"each_episode": dtype}


class BatchError(ValueError):
    """A batch does not have the shape or dtype that its type requires."""


class _OfTasks(Shown):
    """A dataclass of arrays, mappings to arrays, and None, in which every array has a leading task axis."""

    def slice(self, start: int, stop: int) -> Self:
        """Return the tasks start ... stop - 1."""
        return self._changed([self], lambda parts: parts[0][start:stop])

    @classmethod
    def concatenate(cls, parts: Sequence[Self]) -> Self:
        """Join the parts to one batch of all tasks, in the parts' order."""
        return cls._changed(parts, np.concatenate)

    @classmethod
    def _changed(cls, batches: Sequence[Self], change: Callable[[list[Array]], Array]) -> Self:
        made: dict[str, Any] = {}
        for f in fields(cast(Any, cls)):
            values: list[Any] = [getattr(batch, f.name) for batch in batches]
            if isinstance(values[0], Mapping):
                named: list[Mapping[str, Array]] = values
                made[f.name] = {name: change([value[name] for value in named]) for name in named[0]}
            else:
                made[f.name] = None if values[0] is None else change(values)
        return cls(**made)


@dataclass(frozen=True, repr=False)
class TaskBatch(Shown):
    """The tasks of one iteration.

    Attributes:
        params: [B, P] float64, one column per task field.
        ids: [B] int64; the index of a task in a fixed set, -1 when it was drawn from a distribution.
        names: P names of the columns.
        units: P units of the columns, "1" for a number without one.
    """

    params: Array
    ids: Array
    names: tuple[str, ...] = ()
    units: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        B = len(self.params)
        _require(self, "params", self.params, np.float64, (B, len(self.names)))
        _require(self, "ids", self.ids, np.int64, (B,))
        if len(self.units) != len(self.names):
            raise BatchError(
                f"TaskBatch has {len(self.names)} names but {len(self.units)} units; give one unit per name"
            )

    def __len__(self) -> int:
        return len(self.params)

    def slice(self, start: int, stop: int) -> "TaskBatch":
        """Return the tasks start ... stop - 1."""
        return TaskBatch(self.params[start:stop], self.ids[start:stop], self.names, self.units)


@dataclass(frozen=True, repr=False)
class EpisodeBatch(_OfTasks):
    """At most E complete episodes of each of B tasks.

    A task may have fewer than E where sampling ends at a number of steps or episodes; the remaining slots, always
    the last ones, are empty: length 0, neither terminated nor truncated.

    Attributes:
        observations: [B, E, T+1, O] float32, or the integer type of the environment; the entry at `lengths` is the
            observation after the last step.
        actions: [B, E, T, A] float32 as the policy emitted them (before any rescaling), or [B, E, T] int64.
        rewards: [B, E, T] float32.
        terminated: [B, E] bool, the task ended the episode.
        truncated: [B, E] bool, the step limit ended it.
        lengths: [B, E] int32, steps in the episode; 0 where there is none.
        behavior: Parameters of the acting distribution, float32: for a Gaussian `mean` [B, E, T, A], `log_std` [B, A],
            for discrete actions `log_probs` [B, E, T, number of actions]; for a tanh-Gaussian `mean` and `log_stds`
            [B, E, T, A] before the tanh, with the variable drawn from the task's posterior as `latent` [B, E, Z]; for
            Q-values `action_values` [B, E, T, number of actions] and `epsilon` [B]; nothing for uniform actions. Where
            a task is inferred within a trial also what was acted on, `posterior_mean` and `posterior_log_std`
            [B, E, T, Z].
        reward_terms: name -> [B, E, T] float32; they sum to `rewards`.
        initial_state: [B, E, S] float64, the simulator's state after reset, from which an episode can be rendered.
        facts: name -> further facts of the environment, bool or float32: [B, E, T] of every step, or [B, E] of the
            episode; NaN only where a declaration allows it.
    """

    observations: Array
    actions: Array
    rewards: Array
    terminated: Array = field(metadata=_each_episode(np.bool_))
    truncated: Array = field(metadata=_each_episode(np.bool_))
    lengths: Array = field(metadata=_each_episode(np.int32))
    behavior: Mapping[str, Array]
    reward_terms: Mapping[str, Array]
    initial_state: Array
    facts: Mapping[str, Array] = field(default_factory=dict[str, Array])

    def __post_init__(self) -> None:
        if self.rewards.ndim != 3:
            raise BatchError(f"EpisodeBatch.rewards has shape {self.rewards.shape}; required [B, E, T]")
        B, E, T = self.rewards.shape
        kept = self.observations.dtype.type if self.observations.dtype.kind in "iu" else np.float32
        _require(self, "observations", self.observations, kept, (B, E, T + 1, None))
        if self.actions.dtype == np.int64:
            _require(self, "actions", self.actions, np.int64, (B, E, T))
        else:
            _require(self, "actions", self.actions, np.float32, (B, E, T, None))
        _require(self, "rewards", self.rewards, np.float32, (B, E, T))
        for name, dtype in EACH_EPISODE.items():
            if (value := getattr(self, name)) is not None:
                _require(self, name, value, dtype, (B, E))
        _require(self, "initial_state", self.initial_state, np.float64, (B, E, None))
        for name, value in self.reward_terms.items():
            _require(self, f"reward_terms[{name!r}]", value, np.float32, (B, E, T))
        for name, value in self.facts.items():
            dtype = np.bool_ if value.dtype == np.bool_ else np.float32
            _require(self, f"facts[{name!r}]", value, dtype, (B, E) if value.ndim == 2 else (B, E, T))
        for name, value in self.behavior.items():
            _require(self, f"behavior[{name!r}]", value, np.float32, (B, *value.shape[1:]))
        if self.lengths.size and not (self.lengths.min() >= 0 and self.lengths.max() <= T):
            raise BatchError(
                f"EpisodeBatch.lengths lies in [{self.lengths.min()}, {self.lengths.max()}]; required 0 to T={T}"
            )
        real = self.real
        if not real[:, :1].all():
            raise BatchError("EpisodeBatch.lengths: a task has no episode; required at least one per task")
        if (real[:, 1:] & ~real[:, :-1]).any():
            raise BatchError("EpisodeBatch.lengths: an empty slot comes before an episode; required empty slots last")
        if ((self.terminated | self.truncated) & ~real).any():
            raise BatchError("EpisodeBatch: an empty slot has terminated or truncated set; required neither")

    @property
    def each_episode(self) -> dict[str, Array]:
        """The arrays [B, E] by name."""
        return {name: value for name in EACH_EPISODE if (value := getattr(self, name)) is not None}

    @property
    def episode_facts(self) -> dict[str, Array]:
        """The facts of whole episodes, name -> [B, E]; see `fact_of_episodes`."""
        return {name: fact_of_episodes(values, self.lengths) for name, values in self.facts.items()}

    @property
    def real(self) -> Array:
        """Mask [B, E] bool, True where there is an episode."""
        return np.greater(self.lengths, 0)

    @property
    def mask(self) -> Array:
        """Mask [B, E, T] float32, 1 where a step is real and 0 where it is padding."""
        steps = np.arange(int(self.rewards.shape[2]))
        return np.less(steps, self.lengths[..., None]).astype(np.float32)

    @property
    def num_steps(self) -> int:
        """Real environment steps in the batch."""
        return int(self.lengths.sum())

    @property
    def episode_returns(self) -> Array:
        """Undiscounted sum of rewards of each episode, [B, E] float64."""
        return self.rewards.sum(axis=2, dtype=np.float64)

    @property
    def mean_returns(self) -> Array:
        """Mean of each task's episode returns, [B] float64."""
        return (self.episode_returns * self.real).sum(axis=1) / self.real.sum(axis=1)


EACH_EPISODE: Mapping[str, type[np.generic]] = {
    f.name: f.metadata["each_episode"] for f in fields(EpisodeBatch) if "each_episode" in f.metadata
}
"""Fields [B, E] of EpisodeBatch, with their dtypes."""


def fact_of_episodes(values: Array, lengths: Array) -> Array:
    """Reduce a fact [B, E, T] of steps to [B, E]: True if a flag was True in any step, or the last step's number.

    A fact [B, E] of episodes is returned unchanged.
    """
    if values.ndim == 2:
        return values
    if values.dtype == np.bool_:
        return np.asarray(values.any(axis=2))
    last = np.maximum(lengths - 1, 0)[..., None]
    return np.take_along_axis(values, last, axis=2)[..., 0]


@dataclass(frozen=True, repr=False)
class Samples(_OfTasks):
    """Quantities that processing adds to a batch of episodes; zero on padding.

    Attributes:
        returns: [B, E, T] float32, discounted sum of the rewards from a step on.
        values: [B, E, T] float32, the prediction of them by a baseline, or by the critic of an actor-critic.
        advantages: [B, E, T] float32.
        mask: [B, E, T] float32, 1 where the step is real.
        adjusted_rewards: [B, E, T] float32, discounted rewards minus a baseline of theirs; only where an algorithm of
            the DiCE kind needs them, None otherwise.
    """

    returns: Array
    values: Array
    advantages: Array
    mask: Array
    adjusted_rewards: Array | None = None

    def __post_init__(self) -> None:
        for f in fields(self):
            if (value := getattr(self, f.name)) is not None:
                _require(self, f.name, value, np.float32, np.shape(self.returns))
        if self.returns.ndim != 3:
            raise BatchError(f"Samples.returns has shape {self.returns.shape}; required [B, E, T]")


@dataclass(frozen=True, repr=False)
class Step(Shown):
    """Episodes and samples of one inner step k: 0 is pre-update, K is post-update."""

    episodes: EpisodeBatch
    samples: Samples
    k: int

    def __post_init__(self) -> None:
        found, required = self.samples.returns.shape, self.episodes.rewards.shape
        if found != required:
            raise BatchError(f"Step has samples {[*found]} of episodes {[*required]}; required the same [B, E, T]")


@dataclass(frozen=True, repr=False)
class TaskParams(_OfTasks):
    """Policy parameters of every task: name -> [B, ...] float32."""

    params: Params

    def __post_init__(self) -> None:
        for name, value in self.params.items():
            _require(self, f"params[{name!r}]", value, np.float32, (None, *np.shape(value)[1:]))
        sizes = {name: len(value) for name, value in self.params.items()}
        if len(set(sizes.values())) > 1:
            raise BatchError(f"TaskParams entries differ in their number of tasks: {sizes}; required one B for all")

    def __reduce__(self) -> tuple[Any, ...]:
        # Parameters shared by all tasks are sent to workers once, not once per task.
        same = {name for name, value in self.params.items() if len(value) > 1 and value.strides[0] == 0}
        sent = {name: (value[:1], len(value)) if name in same else value for name, value in self.params.items()}
        return _received, (sent,)

    @classmethod
    def broadcast(cls, params: Mapping[str, Array], num_tasks: int) -> "TaskParams":
        """Return the parameters repeated for every task, without copying them."""
        return cls({name: np.broadcast_to(value, (num_tasks, *value.shape)) for name, value in params.items()})


def _received(sent: Mapping[str, Array | tuple[Array, int]]) -> TaskParams:
    """Unpickle the result of pickling TaskParams."""
    return TaskParams(
        {
            name: np.broadcast_to(value[0][0], (value[1], *value[0].shape[1:])) if isinstance(value, tuple) else value
            for name, value in sent.items()
        }
    )


@dataclass(frozen=True, repr=False)
class LearnerState(Shown):
    """All that an update carries over to the next iteration.

    Attributes:
        params: Policy parameters by name, float32.
        optimizer: Moments and step counts of the optimizer by name.
        extra: All other arrays of an algorithm: target networks, KL coefficients, counters, inner step sizes.
    """

    params: Params
    optimizer: Params = field(default_factory=dict[str, Array])
    extra: Params = field(default_factory=dict[str, Array])


@dataclass(frozen=True, repr=False)
class Update(Shown):
    """A finished iteration: the learner for the next one, and the metrics of this one."""

    learner: LearnerState
    metrics: Metrics


@dataclass(frozen=True, repr=False)
class Transitions(Shown):
    """Single steps to learn from off policy, in any leading shape [...]: [N], or [K, N] for N of each of K tasks.

    Attributes:
        observations: [..., O] float32.
        actions: [..., A] float32 as the policy emitted them, or [...] int64.
        rewards: [...] float32.
        next_observations: [..., O] float32.
        terminated: [...] bool, the task ended the episode with this step; a time limit does not count.
    """

    observations: Array
    actions: Array
    rewards: Array
    next_observations: Array
    terminated: Array

    def __post_init__(self) -> None:
        leading = self.rewards.shape
        _require(self, "observations", self.observations, np.float32, (*leading, None))
        if self.actions.dtype == np.int64:
            _require(self, "actions", self.actions, np.int64, leading)
        else:
            _require(self, "actions", self.actions, np.float32, (*leading, None))
        _require(self, "rewards", self.rewards, np.float32, leading)
        _require(self, "next_observations", self.next_observations, np.float32, self.observations.shape)
        _require(self, "terminated", self.terminated, np.bool_, leading)


@dataclass(frozen=True, repr=False)
class Minibatch(Shown):
    """Transitions that one gradient step learns from.

    Attributes:
        transitions: [K, N] of K tasks.
        context: [K, C] from which the tasks are inferred; None where nothing is.
    """

    transitions: Transitions
    context: Transitions | None = None


@dataclass(frozen=True, repr=False)
class Minibatches(Shown):
    """The stored transitions that an iteration's gradient steps learn from, as row indices, not copies.

    Row indices start from 0, in the order in which a run collects its real steps: by iteration, rollout batch, task,
    episode and step. Where an iteration makes fewer than U gradient steps, the last ones are empty: -1.

    Attributes:
        rows: [U, K, N] int64, the transitions of every gradient step.
        task_ids: [U, K] int64, the task of the fixed set whose replay buffer they are from; 0 where there is one.
        context_rows: [U, K, C] int64, from which the tasks are inferred; None where nothing is.
    """

    rows: Array
    task_ids: Array
    context_rows: Array | None = None

    def __post_init__(self) -> None:
        if self.rows.ndim != 3:
            raise BatchError(f"Minibatches.rows has shape {self.rows.shape}; required [U, K, N]")
        U, K, _ = self.rows.shape
        _require(self, "rows", self.rows, np.int64, (U, K, None))
        _require(self, "task_ids", self.task_ids, np.int64, (U, K))
        if self.context_rows is not None:
            _require(self, "context_rows", self.context_rows, np.int64, (U, K, None))

    @property
    def num_updates(self) -> int:
        """Number of gradient steps; those after them are empty."""
        return int(np.count_nonzero(self.task_ids[:, 0] >= 0))


@dataclass(frozen=True, repr=False)
class Evaluation(Shown):
    """Evaluation on B tasks: test episodes after 0 ... K adaptation steps, and the episodes that were adapted to.

    No episode is in both: test episodes are never ones that the policy adapted to.

    Attributes:
        task_params: [B, P] float64.
        task_ids: [B] int64, index of the task in the fixed set it is from, -1 without one.
        names: P names of the columns of `task_params`.
        units: P units of them.
        test_returns: [B, K+1, M] float64, sum of rewards of the test episodes after k steps.
        test_lengths: [B, K+1, M] int32.
        test_terminated: [B, K+1, M] bool, the task ended the episode.
        adaptation_returns: [B, K, N] float64, of the episodes that step k + 1 adapted to.
        adaptation_lengths: [B, K, N] int32.
        adaptation_terminated: [B, K, N] bool.
        test_facts: name -> [B, K+1, M] bool or float32, the facts of whole episodes, see `fact_of_episodes`.
        adaptation_facts: The same names -> [B, K, N].
    """

    task_params: Array
    task_ids: Array
    names: tuple[str, ...]
    units: tuple[str, ...]
    test_returns: Array
    test_lengths: Array
    test_terminated: Array
    adaptation_returns: Array
    adaptation_lengths: Array
    adaptation_terminated: Array
    test_facts: Mapping[str, Array] = field(default_factory=dict[str, Array])
    adaptation_facts: Mapping[str, Array] = field(default_factory=dict[str, Array])

    def __post_init__(self) -> None:
        tasks = self.tasks  # checks them
        if self.test_returns.ndim != 3 or not self.test_returns.shape[1]:
            raise BatchError(f"Evaluation.test_returns has shape {self.test_returns.shape}; required [B, K+1, M]")
        B, K, M = len(tasks), self.test_returns.shape[1] - 1, self.test_returns.shape[2]
        for kind, shape in (("test", (B, K + 1, M)), ("adaptation", (B, K, None))):
            for name, dtype in (("returns", np.float64), ("lengths", np.int32), ("terminated", np.bool_)):
                _require(self, f"{kind}_{name}", getattr(self, f"{kind}_{name}"), dtype, shape)
            facts: Mapping[str, Array] = getattr(self, f"{kind}_facts")
            for name, value in facts.items():
                dtype = np.bool_ if value.dtype == np.bool_ else np.float32
                _require(self, f"{kind}_facts[{name!r}]", value, dtype, shape)
        if self.test_facts.keys() != self.adaptation_facts.keys():
            raise BatchError(
                f"Evaluation.adaptation_facts has {sorted(self.adaptation_facts)}; required the names of test_facts, "
                f"{sorted(self.test_facts)}"
            )

    @property
    def tasks(self) -> TaskBatch:
        """The tasks."""
        return TaskBatch(self.task_params, self.task_ids, self.names, self.units)

    @property
    def adaptation_steps(self) -> int:
        """The number of adaptation steps, K."""
        return self.test_returns.shape[1] - 1

    @property
    def episodes_per_step(self) -> int:
        """N, the episodes per task that every step adapts to."""
        return self.adaptation_returns.shape[2]

    @property
    def num_steps(self) -> int:
        """Environment steps that it took."""
        return int(self.test_lengths.sum()) + int(self.adaptation_lengths.sum())


def _require(owner: object, name: str, value: Array, dtype: Any, shape: tuple[int | None, ...]) -> None:
    is_array = isinstance(value, np.ndarray)  # pyright: ignore[reportUnnecessaryIsInstance]
    fits = is_array and len(value.shape) == len(shape)
    fits = fits and all(want in (None, have) for want, have in zip(shape, value.shape, strict=True))
    if not fits or value.dtype != dtype:
        found = f"has shape {value.shape} and dtype {value.dtype}" if is_array else f"is {type(value).__name__}"
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise BatchError(f"{type(owner).__name__}.{name} {found}; required [{wanted}] and {np.dtype(dtype)}")

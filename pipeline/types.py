"""Data types that stages exchange.

Axes: B tasks, E episodes per task, T steps (padded), O observation, A action, P task parameters, S simulator state.
The axis order [B, E, T, ...] never changes between stages. Padding is zero and starts at index `lengths`.
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
"""Parameter shapes keyed by name, in the order of a network's parameters."""
Metrics = dict[str, float]

ParallelMap = Callable[..., Iterable[Any]]
"""The built-in `map`, or a parallel map that returns results in order."""


def _each_episode(dtype: type[np.generic]) -> dict[str, Any]:
    """Return metadata for an EpisodeBatch field that is None or an array [B, E] with one value per episode.

    Checks, tables and exports find these fields by the metadata; `storage.format.stages` plans their storage.
    """
    return {"each_episode": dtype}


class BatchError(ValueError):
    """Raised for a batch with a wrong shape or dtype."""


class _OfTasks(Shown):
    """Base class for dataclasses whose fields are arrays with a leading task axis, mappings to such arrays, or None."""

    def slice(self, start: int, stop: int) -> Self:
        """Return a batch with the tasks `start` to `stop` - 1."""
        return self._changed([self], lambda parts: parts[0][start:stop])

    @classmethod
    def concatenate(cls, parts: Sequence[Self]) -> Self:
        """Join parts along the task axis, in order."""
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
        params: Task parameters, [B, P] float64, one column per task field.
        ids: Index of each task in a fixed set, [B] int64; -1 for tasks from a distribution.
        names: Names of the P columns.
        units: Units of the P columns; "1" if dimensionless.
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
        """Return a batch with the tasks `start` to `stop` - 1."""
        return TaskBatch(self.params[start:stop], self.ids[start:stop], self.names, self.units)


@dataclass(frozen=True, repr=False)
class EpisodeBatch(_OfTasks):
    """Up to E complete episodes for each of B tasks.

    A task may have fewer than E episodes if sampling stops early. Its last slots are then empty: they have length 0 and
    are neither terminated nor truncated.

    Attributes:
        observations: Observations, [B, E, T+1, O] float32 or the environment's integer type. The entry at `lengths` is
            the observation after the last step.
        actions: Actions as returned by the policy, before any rescaling, [B, E, T, A] float32 or [B, E, T] int64.
        rewards: Rewards, [B, E, T] float32.
        terminated: True if the task ended the episode, [B, E] bool.
        truncated: True if the step limit ended the episode, [B, E] bool.
        lengths: Number of steps in each episode, 0 for empty slots, [B, E] int32.
        behavior: Parameters of the behavior policy's distributions, float32. Gaussian: `mean` [B, E, T, A], `log_std`
            [B, A]. Discrete: `log_probs` [B, E, T, number of actions]. Tanh-Gaussian: `mean` and `log_stds` [B, E, T,
            A] before the tanh, and `latent` [B, E, Z] if drawn from the task's posterior. Q-values: `action_values` [B,
            E, T, number of actions] and `epsilon` [B]. Uniform: none. With inference within a trial, also
            `posterior_mean` and `posterior_log_std` [B, E, T, Z].
        reward_terms: Reward terms, keyed by name, [B, E, T] float32 each; they sum to `rewards`.
        initial_state: Simulator state after reset, for rendering, [B, E, S] float64.
        facts: Values reported by the environment, keyed by name, bool or float32: [B, E, T] per step or [B, E] per
            episode. Only optional facts may be NaN.
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
            raise BatchError(f"EpisodeBatch.rewards has shape {self.rewards.shape}; expected [B, E, T]")
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
                f"EpisodeBatch.lengths lies in [{self.lengths.min()}, {self.lengths.max()}]; expected 0 to T={T}"
            )
        real = self.real
        if not real[:, :1].all():
            raise BatchError("EpisodeBatch.lengths: a task has no episode; every task needs at least one")
        if (real[:, 1:] & ~real[:, :-1]).any():
            raise BatchError("EpisodeBatch.lengths: an empty slot comes before an episode; empty slots must come last")
        if ((self.terminated | self.truncated) & ~real).any():
            raise BatchError("EpisodeBatch: an empty slot has terminated or truncated set; neither may be set")

    @property
    def each_episode(self) -> dict[str, Array]:
        """Arrays with one value per episode, keyed by field name, [B, E] each."""
        return {name: value for name in EACH_EPISODE if (value := getattr(self, name)) is not None}

    @property
    def episode_facts(self) -> dict[str, Array]:
        """Facts reduced to one value per episode, keyed by name, [B, E] each; see `fact_of_episodes`."""
        return {name: fact_of_episodes(values, self.lengths) for name, values in self.facts.items()}

    @property
    def real(self) -> Array:
        """Mask that is False for empty slots, [B, E] bool."""
        return np.greater(self.lengths, 0)

    @property
    def mask(self) -> Array:
        """Mask that is 1 for real steps and 0 for padding, [B, E, T] float32."""
        steps = np.arange(int(self.rewards.shape[2]))
        return np.less(steps, self.lengths[..., None]).astype(np.float32)

    @property
    def num_steps(self) -> int:
        """Number of real environment steps in the batch."""
        return int(self.lengths.sum())

    @property
    def episode_returns(self) -> Array:
        """Undiscounted return of each episode, [B, E] float64."""
        return self.rewards.sum(axis=2, dtype=np.float64)

    @property
    def mean_returns(self) -> Array:
        """Mean episode return per task, [B] float64."""
        return (self.episode_returns * self.real).sum(axis=1) / self.real.sum(axis=1)


EACH_EPISODE: Mapping[str, type[np.generic]] = {
    f.name: f.metadata["each_episode"] for f in fields(EpisodeBatch) if "each_episode" in f.metadata
}
"""Dtypes of the EpisodeBatch fields with one value per episode, keyed by field name."""


def fact_of_episodes(values: Array, lengths: Array) -> Array:
    """Reduce a fact [B, E, T] to [B, E]: for flags, whether the fact was True in any step; for numbers, the last value.

    Facts [B, E] are returned unchanged.
    """
    if values.ndim == 2:
        return values
    if values.dtype == np.bool_:
        return np.asarray(values.any(axis=2))
    last = np.maximum(lengths - 1, 0)[..., None]
    return np.take_along_axis(values, last, axis=2)[..., 0]


@dataclass(frozen=True, repr=False)
class Samples(_OfTasks):
    """Quantities computed from a batch of episodes for learning; zero in the padding.

    Attributes:
        returns: Discounted return from each step onward, [B, E, T] float32.
        values: Returns predicted by a baseline or critic, [B, E, T] float32.
        advantages: Advantage estimates, [B, E, T] float32.
        mask: 1 for real steps and 0 for padding, [B, E, T] float32.
        adjusted_rewards: Discounted rewards minus their baseline, [B, E, T] float32, for DiCE; otherwise None.
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
            raise BatchError(f"Samples.returns has shape {self.returns.shape}; expected [B, E, T]")


@dataclass(frozen=True, repr=False)
class Step(Shown):
    """Episodes and samples of inner step k, from 0 (pre-update) to K (post-update)."""

    episodes: EpisodeBatch
    samples: Samples
    k: int

    def __post_init__(self) -> None:
        found, required = self.samples.returns.shape, self.episodes.rewards.shape
        if found != required:
            raise BatchError(f"Step: samples have shape {[*found]} but episodes {[*required]}; they must match")


@dataclass(frozen=True, repr=False)
class TaskParams(_OfTasks):
    """Per-task policy parameters, keyed by name, [B, ...] float32 each."""

    params: Params

    def __post_init__(self) -> None:
        for name, value in self.params.items():
            _require(self, f"params[{name!r}]", value, np.float32, (None, *np.shape(value)[1:]))
        sizes = {name: len(value) for name, value in self.params.items()}
        if len(set(sizes.values())) > 1:
            raise BatchError(f"TaskParams entries differ in their number of tasks: {sizes}; all must have the same B")

    def __reduce__(self) -> tuple[Any, ...]:
        # Send only one copy of parameters that all tasks share.
        same = {name for name, value in self.params.items() if len(value) > 1 and value.strides[0] == 0}
        sent = {name: (value[:1], len(value)) if name in same else value for name, value in self.params.items()}
        return _received, (sent,)

    @classmethod
    def broadcast(cls, params: Mapping[str, Array], num_tasks: int) -> "TaskParams":
        """Return TaskParams in which all tasks share the same parameters, without copying them."""
        return cls({name: np.broadcast_to(value, (num_tasks, *value.shape)) for name, value in params.items()})


def _received(sent: Mapping[str, Array | tuple[Array, int]]) -> TaskParams:
    """Rebuild TaskParams from their pickled form."""
    return TaskParams(
        {
            name: np.broadcast_to(value[0][0], (value[1], *value[0].shape[1:])) if isinstance(value, tuple) else value
            for name, value in sent.items()
        }
    )


@dataclass(frozen=True, repr=False)
class LearnerState(Shown):
    """Everything that a learner carries over from one iteration to the next.

    Attributes:
        params: Policy parameters, keyed by name, float32.
        optimizer: Optimizer state, such as moments and step counts, keyed by name.
        extra: All other arrays, such as target networks, KL coefficients, counters and inner step sizes, keyed by name.
    """

    params: Params
    optimizer: Params = field(default_factory=dict[str, Array])
    extra: Params = field(default_factory=dict[str, Array])


@dataclass(frozen=True, repr=False)
class Update(Shown):
    """Result of an iteration: the next learner state, and metrics."""

    learner: LearnerState
    metrics: Metrics


@dataclass(frozen=True, repr=False)
class Transitions(Shown):
    """Transitions for off-policy learning, with leading shape [...]: [N], or [K, N] for N transitions per task.

    Attributes:
        observations: Observations, [..., O] float32.
        actions: Actions as returned by the policy, [..., A] float32 or [...] int64.
        rewards: Rewards, [...] float32.
        next_observations: Next observations, [..., O] float32.
        terminated: True if the task ended the episode at this step, [...] bool; time limits do not count.
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
    """Transitions for one gradient step.

    Attributes:
        transitions: N transitions for each of K tasks, [K, N].
        context: C transitions per task for task inference, [K, C]; None without inference.
    """

    transitions: Transitions
    context: Transitions | None = None


@dataclass(frozen=True, repr=False)
class Minibatches(Shown):
    """Row indices of the stored transitions to use in an iteration's gradient steps.

    Row indices count a run's real steps from 0 in collection order: by iteration, rollout batch, task, episode
    and step. If an iteration takes fewer than U gradient steps, the remaining entries are -1.

    Attributes:
        rows: Row indices for each gradient step, [U, K, N] int64.
        task_ids: Task from whose replay buffer the rows are drawn, [U, K] int64; 0 with a single buffer.
        context_rows: Row indices for task inference, [U, K, C] int64; None without inference.
    """

    rows: Array
    task_ids: Array
    context_rows: Array | None = None

    def __post_init__(self) -> None:
        if self.rows.ndim != 3:
            raise BatchError(f"Minibatches.rows has shape {self.rows.shape}; expected [U, K, N]")
        U, K, _ = self.rows.shape
        _require(self, "rows", self.rows, np.int64, (U, K, None))
        _require(self, "task_ids", self.task_ids, np.int64, (U, K))
        if self.context_rows is not None:
            _require(self, "context_rows", self.context_rows, np.int64, (U, K, None))

    @property
    def num_updates(self) -> int:
        """Number of gradient steps, without the unused entries at the end."""
        return int(np.count_nonzero(self.task_ids[:, 0] >= 0))


@dataclass(frozen=True, repr=False)
class Evaluation(Shown):
    """Results of an evaluation on B tasks: test episodes after 0 ... K adaptation steps, and adaptation episodes.

    Test episodes are never used for adaptation.

    Attributes:
        task_params: Task parameters, [B, P] float64.
        task_ids: Index of each task in a fixed set, [B] int64; -1 for tasks from a distribution.
        names: Names of the P columns of `task_params`.
        units: Units of the P columns.
        test_returns: Undiscounted returns of the test episodes after k steps, [B, K+1, M] float64.
        test_lengths: Lengths of the test episodes, [B, K+1, M] int32.
        test_terminated: True if the task ended the test episode, [B, K+1, M] bool.
        adaptation_returns: Returns of the episodes collected for adaptation step k + 1, [B, K, N] float64.
        adaptation_lengths: Lengths of the adaptation episodes, [B, K, N] int32.
        adaptation_terminated: True if the task ended the adaptation episode, [B, K, N] bool.
        test_facts: Facts per test episode, keyed by name, [B, K+1, M] bool or float32 each; see `fact_of_episodes`.
        adaptation_facts: The same facts per adaptation episode, keyed by name, [B, K, N] each.
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
            raise BatchError(f"Evaluation.test_returns has shape {self.test_returns.shape}; expected [B, K+1, M]")
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
                f"Evaluation.adaptation_facts has {sorted(self.adaptation_facts)} but test_facts has "
                f"{sorted(self.test_facts)}; the names must match"
            )

    @property
    def tasks(self) -> TaskBatch:
        """The evaluation tasks as a TaskBatch."""
        return TaskBatch(self.task_params, self.task_ids, self.names, self.units)

    @property
    def adaptation_steps(self) -> int:
        """The number of adaptation steps, K."""
        return self.test_returns.shape[1] - 1

    @property
    def episodes_per_step(self) -> int:
        """Number of episodes per task and adaptation step, N."""
        return self.adaptation_returns.shape[2]

    @property
    def num_steps(self) -> int:
        """Number of environment steps in the evaluation."""
        return int(self.test_lengths.sum()) + int(self.adaptation_lengths.sum())


def _require(owner: object, name: str, value: Array, dtype: Any, shape: tuple[int | None, ...]) -> None:
    is_array = isinstance(value, np.ndarray)  # pyright: ignore[reportUnnecessaryIsInstance]
    fits = is_array and len(value.shape) == len(shape)
    fits = fits and all(want in (None, have) for want, have in zip(shape, value.shape, strict=True))
    if not fits or value.dtype != dtype:
        found = f"has shape {value.shape} and dtype {value.dtype}" if is_array else f"is {type(value).__name__}"
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise BatchError(f"{type(owner).__name__}.{name} {found}; expected [{wanted}] and {np.dtype(dtype)}")

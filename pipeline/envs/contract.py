"""The environment contract for meta-training, for single environments and batches."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol, cast

import gymnasium
import numpy as np

from metaloom.pipeline.envs.task_classes import Classes
from metaloom.pipeline.types import Array, EpisodeBatch


class EnvError(ValueError):
    """Raised when an environment cannot be built or used as configured."""


def require_count(env: gymnasium.Env[Any, Any], option: str, value: object, *, least: int) -> None:
    """Raise EnvError unless an environment option is an integer >= `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise EnvError(f"{type(env).__name__}: {option} must be an integer >= {least}, got {value!r}")


@dataclass(frozen=True)
class TaskField:
    """Description of one task parameter.

    Attributes:
        name: Column name in snake_case.
        unit: Unit such as "m", "m/s" or "rad"; "1" for a dimensionless value.
        description: What the value means.
    """

    name: str
    unit: str
    description: str


class Component(NamedTuple):
    """Description of one entry of an observation or action.

    Attributes:
        name: Short name, unique within the observation or action; it is a column name in tables.
        unit: Unit such as "m" or "rad/s"; "1" for a dimensionless value.
    """

    name: str
    unit: str = "1"


class Fact(NamedTuple):
    """Description of a quantity that an environment reports in addition to observation and reward, such as success.

    Attributes:
        name: Short name, unique within the environment; tables have a column `fact_NAME`.
        kind: "flag" (true or false) or "number".
        per: "step": stored for every step; "episode": stored only for the last step of an episode.
        unit: Unit such as "m" or "N"; "1" for a dimensionless value.
        optional: True if the number may be NaN, meaning that it is missing.
    """

    name: str
    kind: Literal["flag", "number"] = "number"
    per: Literal["step", "episode"] = "step"
    unit: str = "1"
    optional: bool = False


NO_FACTS: Mapping[str, Array] = MappingProxyType({})


class BatchStep(NamedTuple):
    """Result of one control step in each of n rows.

    Attributes:
        observations: Observations after the step, [n, O] float64.
        reward_terms: Reward terms keyed by name, [n] float64 each; they sum to the reward.
        terminated: True if the task ended the episode, [n] bool.
        truncated: True if the environment's own time limit ended the episode, [n] bool.
        facts: All declared facts, at every step, keyed by name, [n] bool or float64 each.
    """

    observations: Array
    reward_terms: Mapping[str, Array]
    terminated: Array
    truncated: Array
    facts: Mapping[str, Array] = NO_FACTS


class BatchEnv(Protocol):
    """Interface for N rows of an environment, each with its own task and episode, that are stepped together.

    A row's results depend only on its task, seed and actions, not on N, the row's index, other rows or threads.

    Attributes:
        num_rows: Number of rows N.
        observation_size: Observation size O.
        action_size: Action size A.
    """

    num_rows: int
    observation_size: int
    action_size: int

    def reset(self, tasks: Array, seeds: Array) -> Array:
        """Start an episode in every row and return the first observations [N, O].

        Row i starts like a single environment with tasks[i] after `reset(seed=seeds[i])`.
        """
        ...

    def step(self, actions: Array, rows: Array) -> BatchStep:
        """Step n rows (sorted, unique) with actions [n, A]. The other rows keep their state."""
        ...

    @property
    def state(self) -> Array:
        """Copy of the simulator state, [N, S] float64; S is 0 if the state cannot be read."""
        ...

    def close(self) -> None:
        """Close the simulators, if there are any."""


class RowBatch(BatchEnv):
    """Base class for batches of environments whose rules are defined for any number of rows.

    Attributes:
        tasks: Task of each row, [N, P].
    """

    tasks: Array

    def take(self, tasks: Array) -> None:
        """Set the tasks of all rows, effective from the next `step`."""
        self.tasks = tasks.copy()

    def begin(self, rngs: Sequence[np.random.Generator]) -> Array:
        """Start new episodes with one generator per row and return the first observations [N, O]."""
        ...

    def reset(self, tasks: Array, seeds: Array) -> Array:
        self.take(tasks)
        return self.begin([np.random.Generator(np.random.PCG64(seed)) for seed in seeds.tolist()])


_ONLY_ROW = np.zeros(1, np.int64)


class MetaEnv(gymnasium.Env[Array, Array]):
    """Base class for gymnasium environments with a distribution of tasks.

    A subclass describes its task parameters in `task_fields` and uses `self.task` in `step`. In the `info` that `step`
    returns, "reward_terms" maps names to terms that sum to the reward, and "facts" maps names to declared facts.
    Document task ranges in the class docstring. Instead of `step` and `reset`, a subclass may define `row_batch`; a
    single environment is then a batch with one row.

    Environments set no time limit; the run's `max_episode_steps` does.
    """

    task_fields: tuple[TaskField, ...] = ()
    """The P task fields, in the order of the task vector."""
    task_set: tuple[tuple[float, ...], ...] | None = None
    """All tasks, if there are finitely many; a task's id is its index. None for a continuous distribution."""
    test_task_set: tuple[tuple[float, ...], ...] | None = None
    """Held-out tasks, if there is a fixed `task_set`. None: evaluation draws new tasks."""
    task_classes: Classes | None = None
    """Named task classes for per-class returns and balanced sampling. None: a single class."""
    observation_components: Sequence[tuple[str, str]] | None = None
    """Name and unit of each observation entry, flattened in C order; see Component. None: unnamed."""
    action_components: Sequence[tuple[str, str]] | None = None
    """Name and unit of each action entry. None: unnamed."""
    facts: Sequence[Fact] = ()
    """Facts that `step` reports; see Fact. This may be a class or an instance attribute."""
    recorded: Mapping[str, Any] = MappingProxyType({})
    """Plain data that runs record in addition to the options, such as which implementation the environment uses."""

    _task: Array | None = None
    _taken: Array | None = None

    def sample_tasks(self, num_tasks: int, rng: np.random.Generator) -> Array:
        """Draw tasks from the task distribution, [B, P] float64. The default draws uniformly from `task_set`.

        Raises EnvError if the environment has neither this method nor a `task_set`.
        """
        if self.task_set is None:
            raise EnvError(f"{type(self).__name__} has no task_set and no method sample_tasks; define one of them")
        return np.array(self.task_set, np.float64)[rng.integers(len(self.task_set), size=num_tasks)]

    def set_task(self, task: Array) -> None:
        """Set the task [P], effective from the next `step`."""
        self._task = check_task(self, task)

    @property
    def task(self) -> Array:
        """Current task, [P] float64. Until the first `set_task`, it is a task drawn with a fixed seed."""
        if self._task is None:
            self.set_task(self.sample_tasks(1, np.random.default_rng(0))[0])
        assert self._task is not None
        return self._task

    def sparse_rewards(self, rewards: Array) -> Array:
        """Convert dense rewards of real steps, in an array of any shape, to sparse rewards.

        Override this if task inference and evaluation use a different reward from the learner, as in PEARL. Do not
        pass padding, since a reward of 0 may mean that the goal is reached. Raises EnvError if the environment has no
        sparse rewards.
        """
        raise EnvError(
            f"{type(self.unwrapped).__name__} has no sparse rewards; use an environment that has them, such as "
            "pearl-sparse-point-robot, or one that defines sparse_rewards"
        )

    def diagnostics(self, episodes: EpisodeBatch) -> Mapping[str, float]:
        """Return metrics for a rollout batch, keyed by name, such as the robot's mean speed; by default, none.

        With env.diagnostics, runs store these metrics as `step_k.NAME`. They must depend only on stored data.
        """
        return {}

    @property
    def has_diagnostics(self) -> bool:
        """True if `diagnostics` is overridden."""
        return type(self).diagnostics is not MetaEnv.diagnostics

    def row_batch(self, num_rows: int, num_threads: int) -> RowBatch:
        """Return a batch of `num_rows` environments.

        Raises EnvError unless a subclass overrides this method.
        """
        raise EnvError(
            f"{type(self).__name__} lacks step or reset, and has no row_batch; define `step` and `reset`, "
            "or `row_batch`"
        )

    @cached_property
    def _row(self) -> RowBatch:
        return self.row_batch(1, 1)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        cls = type(self)
        # Either the subclass's own reset calls this one, or another base class has a reset.
        if cls.row_batch is MetaEnv.row_batch and (cls.reset is not MetaEnv.reset or follows_other_base(cls)):
            return super().reset(seed=seed, options=options)
        super().reset(seed=seed)
        self._take_task()
        return self._row.begin([self.np_random])[0], {}

    def step(self, action: Any) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        if follows_other_base(type(self)):
            return cast(Any, super().step(action))
        self._take_task()
        step = self._row.step(np.array(action, self.action_space.dtype)[None], _ONLY_ROW)
        terms = {name: float(term[0]) for name, term in step.reward_terms.items()}
        info = {"reward_terms": terms, "facts": {name: values[0].item() for name, values in step.facts.items()}}
        return step.observations[0], sum(terms.values()), bool(step.terminated[0]), bool(step.truncated[0]), info

    def _take_task(self) -> None:
        if (task := self.task) is not self._taken:
            self._row.take(task[None])
            self._taken = task

    def batch(self, num_rows: int, num_threads: int) -> BatchEnv | None:
        """Return a BatchEnv with results bitwise identical to this environment's; None to loop over copies instead."""
        with_rows = keeps_rules(self, MetaEnv) and not follows_other_base(type(self))
        return self.row_batch(num_rows, num_threads) if with_rows else None


@cache
def follows_other_base(cls: type[MetaEnv]) -> bool:
    """Return True if `step` comes from a base after MetaEnv, as in `class Tasks(MetaEnv, CartPoleEnv)`."""
    following = cls.mro()[cls.mro().index(MetaEnv) + 1 :]
    steps = (vars(base)["step"] for base in following if "step" in vars(base))
    return cls.row_batch is MetaEnv.row_batch and next(steps) is not gymnasium.Env.step


def keeps_rules(env: gymnasium.Env[Any, Any], base: type[gymnasium.Env[Any, Any]]) -> bool:
    """Return True if an environment uses the `step` and `reset` of `base`, whose rules its batch implements."""
    return type(env).step is base.step and type(env).reset is base.reset


def check_task(env: MetaEnv, task: Array) -> Array:
    """Return a task as an array, [P] float64, or raise EnvError if it has another shape or a non-finite entry."""
    names = [field.name for field in env.task_fields]
    value = np.array(task, np.float64)
    if value.shape != (len(names),) or not np.isfinite(value).all():
        raise EnvError(f"{type(env).__name__}.set_task: got {value!r}; expected {len(names)} finite numbers {names}")
    return value

"""The contract of environments for meta-training, single and batched."""

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
    """Reject an option that is not an integer of at least `least`.

    Raises:
        EnvError: names the option.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise EnvError(f"{type(env).__name__}: {option} is {value!r}; required a whole number of at least {least}")


@dataclass(frozen=True)
class TaskField:
    """One parameter of a task description.

    Attributes:
        name: Column name, snake_case.
        unit: "m", "m/s", "rad"; "1" for a dimensionless value.
        description: Meaning of the value.
    """

    name: str
    unit: str
    description: str


class Component(NamedTuple):
    """One entry of an observation or action.

    Attributes:
        name: Short name, unique in its vector; names a column of tables.
        unit: "m", "rad/s"; "1" for a number without a unit.
    """

    name: str
    unit: str = "1"


class Fact(NamedTuple):
    """Additional quantity that an environment reports besides observation and reward, such as success.

    Attributes:
        name: Short name, unique in the environment; tables have a column `fact_NAME`.
        kind: "flag" (true or false) or "number".
        per: "step": stored for every step; "episode": stored for the episode's last step only.
        unit: "m", "N"; "1" for a number without a unit.
        optional: True if NaN may stand for a missing number.
    """

    name: str
    kind: Literal["flag", "number"] = "number"
    per: Literal["step", "episode"] = "step"
    unit: str = "1"
    optional: bool = False


NO_FACTS: Mapping[str, Array] = MappingProxyType({})


class BatchStep(NamedTuple):
    """Result of one control step of n rows.

    Attributes:
        observations: [n, O] float64.
        reward_terms: name -> [n] float64; their sum is the reward.
        terminated: [n] bool, True if the task ended the episode.
        truncated: [n] bool, True if the environment's own time limit ended it.
        facts: name -> [n] bool or float64, all declared facts in every step.
    """

    observations: Array
    reward_terms: Mapping[str, Array]
    terminated: Array
    truncated: Array
    facts: Mapping[str, Array] = NO_FACTS


class BatchEnv(Protocol):
    """N rows of one environment, each with its own task and episode, stepped together.

    A row's results depend only on its task, seed and actions, not on N, its index, other rows or threads.

    Attributes:
        num_rows: N.
        observation_size: O.
        action_size: A.
    """

    num_rows: int
    observation_size: int
    action_size: int

    def reset(self, tasks: Array, seeds: Array) -> Array:
        """Return the first observations [N, O].

        Row i starts like a single env with tasks[i] after `reset(seed=seeds[i])`.
        """
        ...

    def step(self, actions: Array, rows: Array) -> BatchStep:
        """Step the n rows (sorted, unique) with actions [n, A]; the other rows keep their state."""
        ...

    @property
    def state(self) -> Array:
        """Return a copy of the simulator's state, [N, S] float64; S is 0 if it cannot be read."""
        ...

    def close(self) -> None:
        """Close the simulators, if there are any."""


class RowBatch(BatchEnv):
    """Rows of an environment that defines its rules for any number of rows.

    Attributes:
        tasks: [N, P].
    """

    tasks: Array

    def take(self, tasks: Array) -> None:
        """Set the tasks of all rows, which take effect from the next `step`."""
        self.tasks = tasks.copy()

    def begin(self, rngs: Sequence[np.random.Generator]) -> Array:
        """Return the first observations [N, O] of new episodes, drawn with one generator per row."""
        ...

    def reset(self, tasks: Array, seeds: Array) -> Array:
        self.take(tasks)
        return self.begin([np.random.Generator(np.random.PCG64(seed)) for seed in seeds.tolist()])


_ONLY_ROW = np.zeros(1, np.int64)


class MetaEnv(gymnasium.Env[Array, Array]):
    """A gymnasium Env with a distribution of tasks.

    A subclass names its task parameters in `task_fields` and uses `self.task` in `step`; `info["reward_terms"]` holds
    the terms of the reward by name, which sum to the reward, and `info["facts"]` the declared facts by name. Document
    task ranges in the class docstring. Instead of `step` and `reset`, it may define `row_batch`; a single environment
    is then a batch of one row.

    An environment sets no time limit: the run's `max_episode_steps` does.
    """

    task_fields: tuple[TaskField, ...] = ()
    """The P fields of a task, in the order of its vector."""

    task_set: tuple[tuple[float, ...], ...] | None = None
    """All tasks, if there are finitely many; a task's id is its index. None: a continuous distribution."""

    test_task_set: tuple[tuple[float, ...], ...] | None = None
    """Held-out tasks, if there is a fixed `task_set`; None: any new draw is a held-out task."""

    task_classes: Classes | None = None
    """Named classes of tasks for reporting returns and balanced draws. None: a single class."""

    observation_components: Sequence[tuple[str, str]] | None = None
    """Names and units of an observation's entries, flattened in C order; see Component. None: unnamed."""

    action_components: Sequence[tuple[str, str]] | None = None
    """Names and units of the entries of the environment's actions."""

    facts: Sequence[Fact] = ()
    """Facts that `step` reports, see Fact; a class or instance attribute."""

    recorded: Mapping[str, Any] = MappingProxyType({})
    """Plain data that runs record besides the options, such as which implementation computes the environment."""

    _task: Array | None = None
    _taken: Array | None = None

    def sample_tasks(self, num_tasks: int, rng: np.random.Generator) -> Array:
        """Draw tasks from the distribution, [B, P] float64; by default uniformly from `task_set`.

        Raises:
            EnvError: the environment has neither this method nor a `task_set`.
        """
        if self.task_set is None:
            raise EnvError(f"{type(self).__name__} has no task_set and no method sample_tasks; required one of them")
        return np.array(self.task_set, np.float64)[rng.integers(len(self.task_set), size=num_tasks)]

    def set_task(self, task: Array) -> None:
        """Set the task [P], which takes effect from the next `step`."""
        self._task = check_task(self, task)

    @property
    def task(self) -> Array:
        """The current task, [P] float64; before the first `set_task`, a fixed draw."""
        if self._task is None:
            self.set_task(self.sample_tasks(1, np.random.default_rng(0))[0])
        assert self._task is not None
        return self._task

    def sparse_rewards(self, rewards: Array) -> Array:
        """Convert rewards of real steps, of any shape, to sparse rewards.

        For environments that infer tasks and evaluate policies with another reward than the learner's, as in PEARL. Do
        not pass padding: a reward of 0 may mean the goal.

        Raises:
            EnvError: the environment has no sparse rewards.
        """
        raise EnvError(
            f"{type(self.unwrapped).__name__} has no sparse rewards; required an environment that has them, such as "
            "pearl-sparse-point-robot, or one that defines sparse_rewards"
        )

    def diagnostics(self, episodes: EpisodeBatch) -> Mapping[str, float]:
        """Return metrics of a rollout batch by name, such as the robot's mean speed; by default none.

        With env.diagnostics, runs store them as `step_k.NAME`. They must depend only on stored data.
        """
        return {}

    @property
    def has_diagnostics(self) -> bool:
        """True if `diagnostics` is overridden."""
        return type(self).diagnostics is not MetaEnv.diagnostics

    def row_batch(self, num_rows: int, num_threads: int) -> RowBatch:
        """Return a batch of N rows.

        Raises:
            EnvError: the environment does not define its rules for rows.
        """
        raise EnvError(
            f"{type(self).__name__} lacks step or reset, and has no row_batch; required `step` and `reset`, "
            "or `row_batch`"
        )

    @cached_property
    def _row(self) -> RowBatch:
        return self.row_batch(1, 1)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        cls = type(self)
        # The subclass's own reset calls this one, or another base class has a reset.
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
        """Return a BatchEnv that equals this env bit for bit, or None if only a loop over copies is available."""
        with_rows = keeps_rules(self, MetaEnv) and not follows_other_base(type(self))
        return self.row_batch(num_rows, num_threads) if with_rows else None


@cache
def follows_other_base(cls: type[MetaEnv]) -> bool:
    """Return True without a `row_batch` if a base after MetaEnv has `step`: `class Tasks(MetaEnv, CartPoleEnv)`."""
    following = cls.mro()[cls.mro().index(MetaEnv) + 1 :]
    steps = (vars(base)["step"] for base in following if "step" in vars(base))
    return cls.row_batch is MetaEnv.row_batch and next(steps) is not gymnasium.Env.step


def keeps_rules(env: gymnasium.Env[Any, Any], base: type[gymnasium.Env[Any, Any]]) -> bool:
    """Return False if a subclass overrides step or reset, which the batch of `base` would ignore."""
    return type(env).step is base.step and type(env).reset is base.reset


def check_task(env: MetaEnv, task: Array) -> Array:
    """Validate a task and return it as [P] float64.

    Raises:
        EnvError: it has another shape or a non-finite entry.
    """
    names = [field.name for field in env.task_fields]
    value = np.array(task, np.float64)
    if value.shape != (len(names),) or not np.isfinite(value).all():
        raise EnvError(f"{type(env).__name__}.set_task: found {value!r}; required {len(names)} finite numbers {names}")
    return value

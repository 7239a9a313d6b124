"""BatchEnv for environments without their own: a loop over copies that validates all their results."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from gymnasium.spaces import Box

from metaloom.pipeline.envs import answers
from metaloom.pipeline.envs.answers import RowFault
from metaloom.pipeline.envs.contract import BatchStep, EnvError, MetaEnv
from metaloom.pipeline.types import Array


class LoopBatch:
    """N copies of any environment, stepped one after another.

    Errors and invalid results raise RowFault. Actions and results are copied, so environments may keep and modify both.
    Before each call of an environment, `watch_row` is called with its row. Observations are in `dtype` if it is an
    integer type, otherwise in float64.
    """

    def __init__(
        self,
        make: Callable[[], MetaEnv],
        num_rows: int,
        watch_row: Callable[[int], None] | None = None,
        dtype: np.dtype[Any] | None = None,
    ) -> None:
        self.watch_row: Callable[[int], object] = watch_row or (lambda row: None)
        # Keep other observations in float64, to find values that float32 cannot represent.
        self._dtype = dtype if dtype is not None and dtype.kind in "iu" else np.dtype(np.float64)
        self._envs: list[MetaEnv] = []
        for row in range(num_rows):
            self.watch_row(row)
            self._envs.append(make())
        first = self._envs[0]
        self._name = type(first.unwrapped).__name__
        space = first.observation_space
        assert isinstance(space, Box), "PolicyActions flattens all others"
        self.num_rows = num_rows
        self._shape = space.shape
        self._spaces = _spaces(first)
        self.observation_size: int = int(np.prod(space.shape))
        self.action_size: int = int(np.prod(first.action_space.shape or ()))
        self._terms: tuple[str, ...] | None = None
        self._facts = answers.declared_facts(first)
        self._call_context = _CallContext(self._name)

    def reset(self, tasks: Array, seeds: Array) -> Array:
        observations = np.empty((self.num_rows, self.observation_size), self._dtype)
        for row, (task, seed) in enumerate(zip(tasks, seeds.tolist(), strict=True)):
            self.watch_row(row)
            with self._in_call(row, "set_task"):
                self._envs[row].set_task(task.copy())
            with self._in_call(row, "reset"):
                observation, _ = self._envs[row].reset(seed=seed)
                if (found := _spaces(self._envs[row])) != self._spaces:
                    raise EnvError(
                        f"this task has the spaces {found}; they must be the same in all tasks, {self._spaces}"
                    )
                observations[row] = self._read(observation)
        self._require_finite(observations, range(self.num_rows), "reset")
        return observations

    def step(self, actions: Array, rows: Array) -> BatchStep:
        n, numbers = len(rows), rows.tolist()
        if not np.isfinite(actions).all():
            i = int(np.argmin(np.isfinite(actions).reshape(n, -1).all(axis=1)))
            raise RowFault(f"the policy returned the action {actions[i]}; actions must be finite", numbers[i], "act")
        observations = np.empty((n, self.observation_size), self._dtype)
        terminated, truncated = np.empty(n, np.bool_), np.empty(n, np.bool_)
        terms: list[list[float]] = []
        facts_by_row: list[list[float]] = []
        for i, row in enumerate(numbers):
            self.watch_row(row)
            with self._in_call(row, "step"):
                observation, reward, ends, is_cut, info = self._envs[row].step(actions[i].copy())
                terms.append(self._read_terms(reward, info))
                observations[i] = self._read(observation)
                terminated[i] = answers.flag_of(ends, "terminated")
                truncated[i] = answers.flag_of(is_cut, "truncated")
                facts_by_row.append([*answers.facts_in(info, self._facts).values()])
        self._require_finite(observations, numbers, "step")
        columns = np.array(terms, np.float64).T
        named = dict(zip(self._terms or (), columns, strict=True))
        facts = {
            fact.name: np.array([values[i] for values in facts_by_row], np.bool_ if fact.kind == "flag" else np.float64)
            for i, fact in enumerate(self._facts)
        }
        return BatchStep(observations, named, terminated, truncated, facts)

    def _in_call(self, row: int, call: str) -> "_CallContext":
        """Return a context manager that converts errors within the block to RowFaults for this row and call."""
        self._call_context.row, self._call_context.call = row, call
        return self._call_context

    def _read(self, observation: Any) -> Array:
        values = answers.observation_of(observation, self._shape)
        return values if self._dtype.kind == "f" else answers.as_integers(values, self._dtype)

    def _read_terms(self, reward: Any, info: Any) -> list[float]:
        terms = answers.reward_terms_of(answers.number_of(reward, "reward"), info)
        if self._terms is None:
            self._terms = tuple(terms)
        if terms.keys() != set(self._terms):
            raise EnvError(
                f'info["reward_terms"] has {sorted(terms)}; '
                f"every step must have the terms of the first, {sorted(self._terms)}"
            )
        return [terms[name] for name in self._terms]

    def _require_finite(self, observations: Array, rows: Sequence[int], call: str) -> None:
        """Raise RowFault if an observation is not finite. Checking all rows together is faster than one by one."""
        if self._dtype.kind == "f" and (wrong := answers.wrong_number(observations)) is not None:
            i, problem = wrong
            raise RowFault(f"{self._name}.{call}: {problem}", rows[i], call)

    @property
    def state(self) -> Array:
        states = [_state(env) for env in self._envs]
        same = len({state.shape for state in states}) == 1
        return np.array(states if same else [()] * len(states)).reshape(self.num_rows, -1)

    def close(self) -> None:
        for env in self._envs:
            env.close()


class _CallContext:
    """Context manager that converts errors to a RowFault."""

    def __init__(self, name: str) -> None:
        self.name, self.row, self.call = name, 0, ""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or isinstance(error, RowFault):
            return
        if isinstance(error, EnvError):
            raise RowFault(f"{self.name}.{self.call}: {error}", self.row, self.call) from error
        # BaseException: an environment that calls sys.exit must not end the worker.
        if not answers.is_ctrl_c(error):
            raise RowFault(f"{self.name}.{self.call} raised {answers.last_line(error)}", self.row, self.call) from error


def _state(env: MetaEnv) -> Array:
    """Return a gymnasium MuJoCo environment's positions and velocities, or an empty array for other environments.

    Other environments may use the name `state_vector` for something else; the array is then empty, too.
    """
    read = getattr(env.unwrapped, "state_vector", None)
    try:
        return np.asarray(read() if callable(read) else (), np.float64).reshape(-1)
    except (TypeError, ValueError):
        return np.zeros(0)


def _spaces(env: MetaEnv) -> tuple[Any, Any]:
    # Wrappers keep the spaces from their construction, but the environment may have changed its spaces since.
    return env.unwrapped.observation_space, env.unwrapped.action_space

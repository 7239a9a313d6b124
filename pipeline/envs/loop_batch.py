"""The BatchEnv for environments that offer none: a loop over copies, which trusts none of them."""

from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium.spaces import Box

from metaloom.pipeline.envs.contract import BatchStep, EnvError, MetaEnv
from metaloom.pipeline.envs.fact_checks import declared_facts, facts_in
from metaloom.pipeline.envs.finite_checks import (
    RowFault,
    flag_of,
    is_ctrl_c,
    last_line,
    number_of,
    observation_of,
    reward_terms_of,
)
from metaloom.pipeline.types import Array


def ignore_row(row: int) -> None:
    """Nobody wants to know which row is next."""
    del row


class LoopBatch:
    """N copies of an environment, stepped one after the other. As slow as the environment, and as general.

    Whatever a copy does wrong is a RowFault. Its actions and its answers are copied, so it may keep and change both.

    Attributes:
        watch_row: called with a row before its environment is.
    """

    def __init__(
        self, make: Callable[[], MetaEnv], num_rows: int, watch_row: Callable[[int], None] = ignore_row
    ) -> None:
        self.watch_row = watch_row
        self._envs: list[MetaEnv] = []
        for row in range(num_rows):
            watch_row(row)
            self._envs.append(make())
        first = self._envs[0]
        self._name = type(first.unwrapped).__name__
        space = first.observation_space
        if not isinstance(space, Box):
            raise EnvError(
                f"{self._name} has the observation space {space}; required a Box. "
                "Wrap it, for example in gymnasium.wrappers.FlattenObservation"
            )
        self.num_rows = num_rows
        self._shape = space.shape
        self._spaces = _spaces(first)
        self.observation_size = int(np.prod(space.shape))
        self.action_size = int(np.prod(first.action_space.shape or ()))
        self._terms: tuple[str, ...] | None = None
        self._facts = declared_facts(first)

    def reset(self, tasks: Array, seeds: Array) -> Array:
        observations = np.empty((self.num_rows, self.observation_size))
        for row, (task, seed) in enumerate(zip(tasks, seeds.tolist(), strict=True)):
            self.watch_row(row)
            self._ask(row, "set_task", task.copy())
            observations[row] = self._ask(row, "reset", seed=seed)
        return observations

    def step(self, actions: Array, rows: Array) -> BatchStep:
        n = len(rows)
        observations = np.empty((n, self.observation_size))
        terminated, truncated = np.empty(n, np.bool_), np.empty(n, np.bool_)
        terms: list[list[float]] = []
        told: list[list[float]] = []
        for i, row in enumerate(rows.tolist()):
            self.watch_row(row)
            if not np.isfinite(actions[i]).all():
                raise RowFault(f"found the action {actions[i]}; required finite numbers from the policy", row, "act")
            observations[i], values, terminated[i], truncated[i], facts = self._ask(row, "step", actions[i].copy())
            terms.append(values)
            told.append(facts)
        columns = np.array(terms, np.float64).T
        named = dict(zip(self._terms or (), columns, strict=True))
        return BatchStep(observations, named, terminated, truncated, self._columns_of_facts(told))

    def _columns_of_facts(self, told: list[list[float]]) -> dict[str, Array]:
        return {
            fact.name: np.array([values[i] for values in told], np.bool_ if fact.kind == "flag" else np.float64)
            for i, fact in enumerate(self._facts)
        }

    def _ask(self, row: int, call: str, *arguments: Any, **options: Any) -> Any:
        """Call the row's environment, and read and check its answer."""
        env = self._envs[row]
        try:
            answer = getattr(env, call)(*arguments, **options)
            return {"set_task": _nothing, "reset": self._read_reset, "step": self._read_step}[call](env, answer)
        except RowFault:
            raise
        except EnvError as error:
            raise RowFault(f"{self._name}.{call}: {error}", row, call) from error
        # Also an environment that calls sys.exit: it must not take the worker with it.
        except BaseException as error:
            if is_ctrl_c(error):
                raise
            raise RowFault(f"{self._name}.{call} raised {last_line(error)}", row, call) from error

    def _read_reset(self, env: MetaEnv, answer: Any) -> Array:
        observation, _ = answer
        if _spaces(env) != self._spaces:
            raise EnvError(
                f"found the spaces {_spaces(env)} in this task; required the same in all tasks, {self._spaces}"
            )
        return observation_of(observation, self._shape)

    def _read_step(self, env: MetaEnv, answer: Any) -> tuple[Array, list[float], bool, bool, list[float]]:
        del env
        observation, reward, terminated, truncated, info = answer
        terms = reward_terms_of(number_of(reward, "reward"), info)
        if self._terms is None:
            self._terms = tuple(terms)
        if terms.keys() != set(self._terms):
            raise EnvError(
                f'info["reward_terms"] has {sorted(terms)}; '
                f"required the same terms as in its first step, {sorted(self._terms)}"
            )
        return (
            observation_of(observation, self._shape),
            [terms[name] for name in self._terms],
            flag_of(terminated, "terminated"),
            flag_of(truncated, "truncated"),
            [*facts_in(info, self._facts).values()],
        )

    @property
    def state(self) -> Array:
        states = [_state(env) for env in self._envs]
        same = len({state.shape for state in states}) == 1
        return np.array(states if same else [()] * len(states)).reshape(self.num_rows, -1)

    def close(self) -> None:
        for env in self._envs:
            env.close()


def _nothing(env: MetaEnv, answer: Any) -> None:
    del env, answer


def _state(env: MetaEnv) -> Array:
    """Positions and velocities as gymnasium's MuJoCo environments show them; none of others, which their seed restores.

    An environment may have something else of this name.
    """
    read = getattr(env.unwrapped, "state_vector", None)
    try:
        return np.asarray(read() if callable(read) else (), np.float64).reshape(-1)
    except (TypeError, ValueError):
        return np.zeros(0)


def _spaces(env: MetaEnv) -> tuple[Any, Any]:
    # Wrappers keep the spaces that an environment had when it was made; the environment may have changed them.
    return env.unwrapped.observation_space, env.unwrapped.action_space

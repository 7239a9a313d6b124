"""Adapters between policies and environments: action maps, and gymnasium environments as MetaEnvs."""

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete
from gymnasium.wrappers import TransformObservation

from metaloom.pipeline.envs.answers import declared_facts, is_ctrl_c, last_line, number_of, reward_terms_of
from metaloom.pipeline.envs.config import InfoFact
from metaloom.pipeline.envs.contract import BatchEnv, BatchStep, EnvError, Fact, MetaEnv, TaskField
from metaloom.pipeline.envs.flattening import FlatObservations
from metaloom.pipeline.envs.task_classes import Classes
from metaloom.pipeline.types import Array, EpisodeBatch

log: logging.Logger = logging.getLogger(__name__)

Components = Sequence[tuple[str, str]] | None  # names and units, or None if unknown


class ActionMap:
    """Map from a policy's actions [..., A] to an environment's box.

    With a scale c, [-c, c] is mapped linearly onto the box; otherwise actions are unchanged. Results are clipped to
    the box. With c = 10 and a policy with standard deviation 1, as in ProMP, the noise is 10% of the box's half-width.
    """

    def __init__(self, box: Box, scale: float | None) -> None:
        self.low: Array = box.low.astype(np.float64)
        self.high: Array = box.high.astype(np.float64)
        self.scale = scale
        if scale is not None and not is_bounded(box):
            raise EnvError(
                f"the action box {box} has no bounds, so action_scale {scale} cannot be mapped onto it; "
                "use unscaled actions: --set env.action_scale=null"
            )

    def __call__(self, actions: Array) -> Array:
        """Return float64 actions with the shape of `actions`."""
        if self.scale is None:
            return np.clip(actions, self.low, self.high, dtype=np.float64)
        mapped = actions.astype(np.float64)
        mapped += self.scale
        mapped *= (self.high - self.low) / (2 * self.scale)
        mapped += self.low
        return np.clip(mapped, self.low, self.high, out=mapped)


class DiscreteActionMap:
    """Map from a policy's actions 0 ... n - 1 to an environment's actions, which may have an offset or several parts.

    Each combination of parts is one action, with the last part varying fastest, so joint distributions can be learned.
    """

    def __init__(self, space: Discrete | MultiDiscrete | MultiBinary, scale: float | None) -> None:
        if scale is not None:
            raise EnvError(
                f"env.action_scale is {scale:g}, but the actions {space} are discrete and cannot be scaled; use "
                "--set env.action_scale=null"
            )
        self._shape = space.shape or ()
        self._sizes = sizes_of(space)
        self._start = np.int64(0) if isinstance(space, MultiBinary) else space.start

    def __call__(self, actions: Array) -> Array:
        """Return int64 actions, with the shape of `actions` followed by the shape of the space."""
        if not self._shape:  # seven times as fast for a Discrete space
            return actions + self._start
        parts = np.stack(np.unravel_index(actions, self._sizes), axis=-1)
        return parts.reshape(*np.shape(actions), *self._shape) + self._start


AnyActionMap = ActionMap | DiscreteActionMap
ActionSpace = Box | Discrete | MultiDiscrete | MultiBinary
MOST_ACTIONS = 4096
"""Maximum number of combinations in a MultiDiscrete or MultiBinary space; each is an output of the network."""


def action_map(space: ActionSpace, scale: float | None) -> AnyActionMap:
    """Return the map from a policy's actions to an environment's action space."""
    return ActionMap(space, scale) if isinstance(space, Box) else DiscreteActionMap(space, scale)


def sizes_of(space: Discrete | MultiDiscrete | MultiBinary) -> tuple[int, ...]:
    """Return the number of choices in each part of a discrete space."""
    if isinstance(space, Discrete):
        return (int(space.n),)
    if isinstance(space, MultiBinary):
        return (2,) * math.prod(space.shape)
    return tuple(space.nvec.ravel().tolist())


def is_bounded(box: Box) -> bool:
    """Return True if all bounds of a box are finite. Bounds beyond ±1e30 count as infinite."""
    return bool(np.all(np.abs(box.low) < _NO_BOUND) and np.all(np.abs(box.high) < _NO_BOUND))


_NO_BOUND = 1e30


class WithTasks(gymnasium.Wrapper[Array, Any, Any, Any], MetaEnv):  # pyright: ignore[reportIncompatibleMethodOverride]
    """Wrapped environment with the tasks of the MetaEnv `tasks`, which is `env` itself or wrapped by it."""

    env: Any

    def __init__(self, env: gymnasium.Env[Any, Any], tasks: MetaEnv) -> None:
        super().__init__(env)
        self.observation_components: Components = declared_components(env, "observation_components")
        self.action_components: Components = declared_components(env, "action_components")
        self.facts: tuple[Fact, ...] = declared_facts(env)
        self._tasks = tasks
        self.task_fields: tuple[TaskField, ...] = tasks.task_fields
        self.task_set: tuple[tuple[float, ...], ...] | None = tasks.task_set
        self.test_task_set: tuple[tuple[float, ...], ...] | None = tasks.test_task_set
        self.task_classes: Classes | None = tasks.task_classes

    def sample_tasks(self, num_tasks: int, rng: np.random.Generator) -> Array:
        return self._tasks.sample_tasks(num_tasks, rng)

    def set_task(self, task: Array) -> None:
        self._tasks.set_task(task)

    @property
    def task(self) -> Array:
        return self._tasks.task

    def sparse_rewards(self, rewards: Array) -> Array:
        return self._tasks.sparse_rewards(rewards)

    def diagnostics(self, episodes: EpisodeBatch) -> Mapping[str, float]:
        return self._tasks.diagnostics(episodes)

    @property
    def has_diagnostics(self) -> bool:
        return self._tasks.has_diagnostics


class PolicyActions(WithTasks):
    """Wrapper of a MetaEnv that converts the policy's actions with an action map.

    Box observations are unchanged; others are flattened.
    """

    _closed = False

    def __init__(self, env: MetaEnv, scale: float | None) -> None:
        # Leave arrays of any shape unchanged; the network determines whether they are images.
        super().__init__(env if isinstance(env.observation_space, Box) else WithTasks(FlatObservations(env), env), env)
        self.unflattened: gymnasium.Space[Any] = env.observation_space
        space = _action_space(env)
        self.action_map: AnyActionMap = action_map(space, scale)
        self.action_space: gymnasium.Space[Any]
        if isinstance(space, Box):
            self.action_space = space if scale is None else Box(-scale, scale, space.shape, np.float32)
        else:
            self.action_space = Discrete(math.prod(sizes_of(space)))
            if not isinstance(space, Discrete):
                self.action_components: None = None  # since each action is a combination of parts

    def step(self, action: Array) -> tuple[Array, Any, bool, bool, dict[str, Any]]:
        return self.env.step(self.action_map(np.asarray(action)).astype(self.env.action_space.dtype))

    def close(self) -> None:
        """Close the environment once and log any error: many fail if closed twice or before their first reset."""
        if self._closed:
            return
        self._closed = True
        try:
            super().close()
        # No result depends on the environment any more.
        except BaseException as problem:
            if is_ctrl_c(problem):
                raise
            log.warning("%s.close raised %s", type(self.unwrapped).__name__, last_line(problem))

    def batch(self, num_rows: int, num_threads: int) -> BatchEnv | None:
        batch = self._tasks.batch(num_rows, num_threads)
        return None if batch is None else PolicyActionsBatch(batch, self.action_map)


class PolicyActionsBatch:
    """Wrapper of a BatchEnv that converts the policy's actions with an action map."""

    def __init__(self, batch: BatchEnv, action_map: AnyActionMap) -> None:
        self._batch = batch
        self._action_map = action_map
        self.num_rows: int = batch.num_rows
        self.observation_size: int = batch.observation_size
        self.action_size: int = batch.action_size

    def reset(self, tasks: Array, seeds: Array) -> Array:
        return self._batch.reset(tasks, seeds)

    def step(self, actions: Array, rows: Array) -> BatchStep:
        return self._batch.step(self._action_map(actions), rows)

    @property
    def state(self) -> Array:
        return self._batch.state

    def close(self) -> None:
        self._batch.close()


class SingleTask(gymnasium.Wrapper[Array, Any, Any, Any], MetaEnv):  # pyright: ignore[reportIncompatibleMethodOverride]
    """Wrapper that turns a gymnasium environment into a MetaEnv with a single task that has no parameters.

    `facts` maps the names of facts to their entries in `info`; without it, the facts that the environment declares are
    used.
    """

    env: Any
    task_set: tuple[tuple[()]] = ((),)

    def __init__(self, env: gymnasium.Env[Any, Any], facts: Mapping[str, InfoFact] | None = None) -> None:
        super().__init__(env)
        self.observation_components: Components = declared_components(env, "observation_components")
        self.action_components: Components = declared_components(env, "action_components")
        self._keys = dict(facts or {})
        self._clashes = False
        declared = tuple(Fact(name, fact.kind, fact.per) for name, fact in self._keys.items())
        self.facts: tuple[Fact, ...] = declared or declared_facts(env)
        robot = env.unwrapped
        if hasattr(robot, "observation_structure") and self.observation_space.shape == robot.observation_space.shape:
            # Import here, since other environments do not need MuJoCo.
            from metaloom.pipeline.envs.mujoco_robot import gymnasium_components

            observation, action = gymnasium_components(robot)
            # Wrappers that change observations or actions declare None.
            if not env.has_wrapper_attr("observation_components"):
                self.observation_components = observation
            if not env.has_wrapper_attr("action_components"):
                self.action_components = action

    def step(self, action: Array) -> tuple[Array, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, returned = self.env.step(action)
        info: Any = returned
        if isinstance(returned, Mapping):
            if "reward_terms" in info and not self._has_terms(reward, info):
                info = {name: value for name, value in info.items() if name != "reward_terms"}
            if facts := self._facts_of(info):
                info = {**info, **facts}
        return observation, reward, terminated, truncated, info

    def _has_terms(self, reward: Any, info: Mapping[str, Any]) -> bool:
        """Return True if all reward terms in `info` have been valid so far; warn the first time that they are not."""
        try:
            reward_terms_of(number_of(reward, "reward"), info)
        except EnvError as problem:
            if not self._clashes:
                log.warning(
                    "%s: %s; this environment's reward terms are not stored", type(self.unwrapped).__name__, problem
                )
            self._clashes = True
        return not self._clashes

    def _facts_of(self, info: Mapping[str, Any]) -> dict[str, Any]:
        """Return the `facts` entry for `info`: facts collected from other keys, or {} in place of undeclared facts."""
        if not self._keys:
            return {"facts": {}} if "facts" in info and not self.facts else {}
        missing = [fact.key for fact in self._keys.values() if fact.key not in info]
        if missing:
            found = sorted(map(str, info))
            raise EnvError(f"env.facts: info has {found}, but no {missing[0]!r}; every step must report it")
        return {"facts": {name: info[fact.key] for name, fact in self._keys.items()}}


def observe_places(env: gymnasium.Env[Any, Any], places: Sequence[int]) -> gymnasium.Env[Any, Any]:
    """Wrap an environment so that it returns only some entries of its observations, which must be vectors."""
    env = env if isinstance(env.observation_space, Box) else FlatObservations(env)
    space, chosen = env.observation_space, list(places)
    if not isinstance(space, Box) or len(space.shape) != 1 or max(chosen) >= space.shape[0]:
        raise EnvError(
            f"env.observed is {chosen}, but the observation space of {type(env.unwrapped).__name__} is {space}; "
            "use valid indices of a one-dimensional Box, counted from 0"
        )
    shown = Box(space.low[chosen], space.high[chosen], dtype=space.dtype.type)
    return TransformObservation(env, lambda observation: observation[chosen], shown)


def declared_components(env: gymnasium.Env[Any, Any], name: str) -> Components:
    """Return the components declared by the outermost wrapper with a declaration, or else by the environment."""
    return env.get_wrapper_attr(name) if env.has_wrapper_attr(name) else None


def _action_space(env: MetaEnv) -> ActionSpace:
    space, name = env.action_space, type(env.unwrapped).__name__
    if isinstance(space, Discrete):
        return space
    if isinstance(space, MultiDiscrete | MultiBinary):
        if (count := math.prod(sizes_of(space))) > MOST_ACTIONS:
            raise EnvError(
                f"{name} has the action space {space} with {count:,} combinations, each of which would be an output of "
                f"the policy's network; at most {MOST_ACTIONS:,} are supported. {_OWN_ACTIONS}"
            )
        return space
    if isinstance(space, Box) and len(space.shape) == 1 and space.shape[0] and np.issubdtype(space.dtype, np.floating):
        return space
    raise EnvError(
        f"{name} has the action space {space}; expected a one-dimensional, non-empty Box of floats for a Gaussian "
        f"policy, or Discrete, MultiDiscrete or MultiBinary for a categorical one. {_OWN_ACTIONS}"
    )


_OWN_ACTIONS = (
    "Wrap it in a custom gymnasium.ActionWrapper that takes such actions: --set 'env.wrappers=[my_module:Class]'"
)

"""Facts that runs record about their environments, such as class, options and sizes."""

import inspect
import math
import re
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.registration import load_env_creator
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple

from metaloom.pipeline.envs.config import EnvConfig
from metaloom.pipeline.envs.contract import Component, EnvError, MetaEnv
from metaloom.pipeline.envs.registry import find_env, require_env
from metaloom.pipeline.envs.wrappers import ActionSpace, PolicyActions
from metaloom.pipeline.shown import plain_data

_COMPONENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")


def env_facts(config: EnvConfig, env: MetaEnv) -> dict[str, Any]:
    """Return facts that identify an environment even if defaults change later, as JSON data.

    These are `class` as module:Class; `options` of its constructor, including defaults; `observation_size`;
    `observation_shape` if it has several axes; `action_size` or, for discrete actions, `num_choices`; `actions_taken`,
    the space into which a policy's actions are mapped; and the environment's `recorded` data.
    """
    path, factory, given = _factory(config)
    actions = env.action_space
    shape = env.observation_space.shape or ()
    several_axes = {"observation_shape": list(shape)} if len(shape) > 1 else {}
    # Stored runs use the name num_choices.
    sizes = {"num_choices": int(actions.n)} if isinstance(actions, Discrete) else {"action_size": _size(actions)}
    try:
        parameters = inspect.signature(factory).parameters.values()
    except ValueError:  # code written in C has no signature
        parameters = ()
    named = {p.name: p.default for p in parameters if p.default is not p.empty and p.name != "render_mode"}
    found = env.unwrapped  # in other classes, `recorded` may mean anything
    return {
        "class": path,
        "options": {name: _plain(value) for name, value in {**named, **given}.items()},
        "observation_size": _size(env.observation_space),
        **several_axes,
        **sizes,
        "actions_taken": described_space(taken_space(env)),
        **(found.recorded if isinstance(found, MetaEnv) else {}),
    }


def taken_space(env: MetaEnv) -> ActionSpace:
    """Return the environment's own action space, into which a policy's actions are mapped."""
    space = (env.env if isinstance(env, PolicyActions) else env).action_space
    assert isinstance(space, ActionSpace)
    return space


def described_space(space: ActionSpace) -> dict[str, Any]:
    """Convert an action space to JSON data; `space_from` reverses this."""
    if isinstance(space, Discrete):
        return {"n": int(space.n), "start": int(space.start)}
    if isinstance(space, MultiDiscrete):
        return {"nvec": space.nvec.tolist(), "start": space.start.tolist(), "dtype": str(space.dtype)}
    if isinstance(space, MultiBinary):
        return {"binary": [*space.shape]}
    return {"low": _plain(space.low), "high": _plain(space.high), "dtype": str(space.dtype)}


def space_from(described: Mapping[str, Any]) -> ActionSpace:
    """Restore an action space from the result of `described_space`."""
    if "n" in described:
        return Discrete(described["n"], start=described["start"])
    if "binary" in described:
        (n, *more) = shape = tuple(described["binary"])
        return MultiBinary(shape if more else n)
    if "nvec" in described:
        return MultiDiscrete(described["nvec"], np.dtype(described["dtype"]).type, start=described["start"])
    dtype = np.dtype(described["dtype"])
    low, high = (np.array([float(value) for value in described[end]], dtype) for end in ("low", "high"))
    return Box(low, high, dtype=dtype.type)


def described_parts(space: gymnasium.Space[Any]) -> dict[str, Any]:
    """Convert an observation space to JSON data, without the bounds of a Box; see `parts_from`."""
    if isinstance(space, Dict):
        return {"dict": [[key, described_parts(part)] for key, part in space.items()]}
    if isinstance(space, Tuple):
        return {"tuple": [described_parts(part) for part in space]}
    if isinstance(space, Box):
        return {"shape": [*space.shape], "dtype": str(space.dtype)}
    assert isinstance(space, ActionSpace), "FlatObservations rejects all others"
    return described_space(space)


def parts_from(described: Mapping[str, Any]) -> gymnasium.Space[Any]:
    """Restore an observation space, to the extent needed for flattening, from the result of `described_parts`."""
    if "dict" in described:
        return Dict(OrderedDict((key, parts_from(part)) for key, part in described["dict"]))
    if "tuple" in described:
        return Tuple([parts_from(part) for part in described["tuple"]])
    if "shape" in described:
        return Box(0, 1, described["shape"], np.dtype(described["dtype"]).type)
    return space_from(described)


def component_facts(env: MetaEnv) -> dict[str, Any]:
    """Return an environment's declared components: `observation` and `action`, each with `names` and `units`."""
    kinds = {
        "observation": (env.observation_components, env.observation_space),
        "action": (env.action_components, env.action_space),
    }
    facts: dict[str, Any] = {}
    for kind, (declared, space) in kinds.items():
        if declared is None:
            continue
        where = f"{type(env.unwrapped).__name__}.{kind}_components"
        parts = [Component(*part) for part in declared]
        names = [part.name for part in parts]
        size = 0 if isinstance(space, Discrete) else _size(space)
        if len(names) != size:
            raise EnvError(
                f"{where}: got {len(names)} components; expected {size}, one for each number of the {kind} space "
                f"{space}. Declare all of them or set None; a wrapper that changes the {kind}s must do the same"
            )
        if wrong := [name for name in names if not _COMPONENT.fullmatch(name) or names.count(name) > 1]:
            raise EnvError(
                f"{where}: invalid name {wrong[0]!r}; names must be unique and consist of letters, digits, '_', '-' "
                "and '.'"
            )
        facts[kind] = {"names": names, "units": [part.unit for part in parts]}
    return facts


def class_path(config: EnvConfig) -> str:
    """Return the path of an environment's class, module:Class, or only its name if an object was registered."""
    return _factory(config)[0]


def _factory(config: EnvConfig) -> tuple[str, Any, Mapping[str, Any]]:
    """Return the path of an environment's class or factory function, the object itself, and its options."""
    path = require_env(config.name)
    if path not in gymnasium.registry:
        return path, find_env(config.name), config.options
    spec = gymnasium.spec(path)
    creator = spec.entry_point
    factory = load_env_creator(creator) if isinstance(creator, str) else creator
    path = creator if isinstance(creator, str) else getattr(creator, "__qualname__", repr(creator))
    return path, factory, {**spec.kwargs, **config.options}


def _plain(value: Any) -> Any:
    # Omit the memory address, which differs from run to run.
    return plain_data(value, lambda other: f"a {type(other).__qualname__}")


def _size(space: gymnasium.Space[Any]) -> int:
    return math.prod(space.shape or ())

"""Flattening of composite observations, in the order and with the values of gymnasium's `flatten`."""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple
from gymnasium.spaces.utils import flatten, flatten_space

from metaloom.pipeline.envs.contract import EnvError
from metaloom.pipeline.types import Array

_MOST_NAMES = 1000  # maximum number of components to name; names for an image's pixels would be useless


class FlatObservations(gymnasium.ObservationWrapper[Any, Any, Any]):
    """Wrapper that flattens observations. Discrete parts become one-hot; parts of a Dict keep its order.

    Raises EnvError if a part cannot be flattened.
    """

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self._space = space = env.observation_space
        if not _flattens(space):
            kept = [key for key, part in _parts(space) if _flattens(part)] if isinstance(space, Dict | Tuple) else []
            remedy = (
                "Remove the other parts: --set 'env.wrappers=[{name: FilterObservation, options: {filter_keys: "
                f"{json.dumps(kept)}}}}}]'"
                if kept
                else "Wrap it in a custom gymnasium.Wrapper that returns one: --set 'env.wrappers=[my_module:Class]'"
            )
            raise EnvError(
                f"{type(env.unwrapped).__name__} has the observation space {space}; expected a Box, Discrete, "
                f"MultiDiscrete or MultiBinary, or a Dict or Tuple of such parts. {remedy}"
            )
        self.observation_space = flat_space = cast(Box, flatten_space(space))
        declared = "observation_components"
        is_open = not env.has_wrapper_attr(declared) or env.get_wrapper_attr(declared) is None
        # The components of a single part are numbered anyway.
        if is_open and isinstance(space, Dict | Tuple) and len(flat_space.low) <= _MOST_NAMES:
            names = [re.sub(r"[^\w.-]", "_", name, flags=re.ASCII) for name in _names(space, "")]
            self.observation_components: list[tuple[str, str]] | None = (
                [(name, "1") for name in names] if len({*names}) == len(names) else None
            )

    def observation(self, observation: Any) -> Array:
        return flat(self._space, observation)


def flat(space: gymnasium.Space[Any], observation: Any) -> Array:
    """Flatten an observation to a vector, in which discrete values are one-hot.

    A scalar is accepted for a Box of size 1. Raises EnvError if the observation is not in the space; the bounds of a
    Box are not checked.
    """
    _require_in(space, observation, "observation")
    return np.asarray(flatten(space, observation))


def _require_in(space: gymnasium.Space[Any], value: Any, name: str) -> None:
    # Reject values that gymnasium would silently convert.
    if isinstance(space, Dict):
        if not isinstance(value, Mapping) or value.keys() != space.keys():
            found = sorted(map(str, value)) if isinstance(value, Mapping) else type(value).__name__
            raise EnvError(f"got {found} as the {name}; expected a dict of {sorted(space)}, as its space declares")
        for key, part in space.items():
            _require_in(part, value[key], f"{name}[{key!r}]")
    elif isinstance(space, Tuple):
        if not isinstance(value, Sequence) or len(value) != len(space):
            raise EnvError(f"got {value!r:.100} as the {name}; expected a tuple of {len(space)} parts")
        for n, part in enumerate(space):
            _require_in(part, value[n], f"{name}[{n}]")
    elif isinstance(space, Box):
        array = np.asarray(value)
        is_the_one = array.shape == () and math.prod(space.shape) == 1
        if array.dtype.kind not in "biuf" or not (array.shape == space.shape or is_the_one):
            raise EnvError(
                f"got dtype {array.dtype} and shape {array.shape} as the {name}; expected numbers of shape "
                f"{space.shape}"
            )
    elif not space.contains(value):
        kind = "an integer" if isinstance(space, Discrete) else "an array"
        raise EnvError(f"got the {name} {value!r}; expected {kind} in {space}, the {name} space")


def _flattens(space: gymnasium.Space[Any]) -> bool:
    if isinstance(space, Dict | Tuple):
        return len(space) > 0 and all(_flattens(part) for _, part in _parts(space))
    return isinstance(space, Box | Discrete | MultiDiscrete | MultiBinary)


def _parts(space: Dict | Tuple[Any]) -> Iterable[tuple[Any, gymnasium.Space[Any]]]:
    return space.items() if isinstance(space, Dict) else enumerate(space)


def _names(space: gymnasium.Space[Any], name: str) -> Iterator[str]:
    if isinstance(space, Dict | Tuple):
        for key, part in _parts(space):
            yield from _names(part, f"{name}.{key}" if name else str(key))
    elif isinstance(space, Box) and space.shape == ():
        yield name
    else:
        yield from (f"{name}.{n}" for n in range(len(cast(Box, flatten_space(space)).low.reshape(-1))))

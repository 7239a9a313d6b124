"""Changes of settings as Python has them, mappings by section, written as `--set` takes them."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from metaloom.pipeline.plugins import path_of
from metaloom.pipeline.schema import ConfigError


def assignments(settings: Mapping[str, Any]) -> list[str]:
    """Changes of settings as `--set` takes them: KEY=VALUE, with a key for every field of a section."""
    # A section without changes stays; as a value, {} would replace it.
    changes = {name: value for name, value in settings.items() if value != {}}
    return [f"{key}={json.dumps(value, default=plain)}" for key, value in _fields(changes)]


def plain(value: Any) -> Any:
    """Numbers of NumPy's and paths as JSON has them."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, type):  # which another process could not find
        raise ConfigError(f'found the class {value.__qualname__}; required its name, "{path_of(value)}"')
    raise ConfigError(f"found the setting {value!r}; required numbers, text, lists or mappings")


def _fields(settings: Mapping[str, Any], *sections: str) -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _fields(value, *sections, name)
        else:
            yield ".".join((*sections, name)), value

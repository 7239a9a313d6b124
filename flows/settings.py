"""Settings as text: changes for `--set`, and settings files for `metaloom train`."""

import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np

from metaloom.flows.errors import UsageError
from metaloom.pipeline.config.run import RunConfig, build_config
from metaloom.pipeline.config.yaml import dump, parse
from metaloom.pipeline.plugins import path_of
from metaloom.pipeline.shown import ConfigError
from metaloom.storage.format.settings import dotted


def assignments(settings: Mapping[str, Any]) -> list[str]:
    """Return setting changes as `KEY=VALUE` strings, with sections flattened to dotted keys."""
    # Skip a section without changes, since the value {} would replace the whole section.
    changes = {name: value for name, value in settings.items() if value != {}}
    return [f"{key}={json.dumps(value, default=plain)}" for key, value in dotted(changes)]


def plain(value: Any) -> Any:
    """Return a NumPy value or a path as a JSON value; raise ConfigError for anything else."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, type):  # another process could not find it
        raise ConfigError(f'a setting cannot be the class {value.__qualname__}; use its name, "{path_of(value)}"')
    raise ConfigError(f"a setting cannot be {value!r}; use numbers, text, lists or mappings")


SettingsFormat = Literal["yaml", "toml", "json"]


def settings_file(config: RunConfig, form: SettingsFormat) -> str:
    """Return the text of a settings file for `metaloom train` that contains all settings of a run."""
    write, read = _FORMATS[form]
    text = write(config.model_dump(mode="json"))
    with suppress(ValueError):
        if build_config(read(text)) == config:
            return text
    raise UsageError(f"a {form} file cannot hold these settings; use another --format, such as json")


def _toml_lines(settings: Mapping[str, Any], *sections: str) -> Iterator[str]:
    """Yield one TOML line per setting, named as in `--set`; null settings are skipped, since TOML has no null."""
    for name, value in settings.items():
        path = (*sections, name)
        if isinstance(value, Mapping) and value:
            yield from _toml_lines(value, *path)
        elif value is not None:
            # JSON numbers, booleans, strings and lists are also valid TOML.
            keys = (key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key) for key in path)
            yield f"{'.'.join(keys)} = {json.dumps(value)}"


_FORMATS: Mapping[SettingsFormat, tuple[Callable[[Any], str], Callable[[str], Any]]] = {
    "yaml": (dump, parse),
    "toml": (lambda settings: "".join(f"{line}\n" for line in _toml_lines(settings)), tomllib.loads),
    "json": (lambda settings: json.dumps(settings, indent=2) + "\n", json.loads),
}

"""Settings from files and `--set`, and messages about invalid settings."""

import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from pydantic_core import ErrorDetails

from metaloom.pipeline.config.yaml import parse
from metaloom.pipeline.schema import ConfigError, describe

_NAMED_SECTIONS = ("env", "algorithm", "baseline", "policy", "encoder", "optimizer")
"""Sections that may be given as a bare name, which stands for the section with this name and all defaults."""


def load_config(path: Path) -> dict[str, Any]:
    """Read settings from a YAML, JSON or TOML file without validating them, or raise ConfigError if this fails."""
    try:
        text = path.read_text(encoding="utf-8")
        settings = tomllib.loads(text) if path.suffix == ".toml" else parse(text)
    except (OSError, ValueError) as error:
        kind = "TOML" if path.suffix == ".toml" else "YAML or JSON"
        raise ConfigError(f"cannot read {path} as {kind}: {error}") from None
    if not isinstance(settings, dict):
        raise ConfigError(f"{path}: expected a mapping of RunConfig fields, got {type(settings).__name__}")
    return settings


def override(settings: Mapping[str, Any], assignments: Iterable[str]) -> dict[str, Any]:
    """Return settings with `a.b=value` assignments applied. Values are YAML (numbers, lists, true, null, text).

    Raises ConfigError if an assignment has no "=" or an empty key, sets a field of a value that is not a section, or
    replaces a section in which an earlier assignment set a field.
    """
    merged: dict[str, Any] = json.loads(json.dumps(settings))
    done: list[str] = []
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not all(key.split(".")):
            raise ConfigError(f"--set {assignment}: expected KEY=VALUE, for example algorithm.inner_lr=0.05")
        if lost := [earlier for earlier in done if earlier.startswith(f"{key}.")]:
            raise ConfigError(
                f"--set {assignment}: this replaces all of {key} and discards {lost[0]}; put it before that option"
            )
        done.append(key)
        *sections, last = key.split(".")
        target = merged
        for section in sections:
            # `env=NAME` is short for env.name=NAME, even if another override within env follows.
            if section in _NAMED_SECTIONS and isinstance(target.get(section), str):
                target[section] = {"name": target[section]}
            target = target.setdefault(section, {})
            if not isinstance(target, dict):
                raise ConfigError(f"--set {assignment}: {section} is a value, not a section, so it has no field {last}")
        try:
            target[last] = parse(text)
        except ValueError:
            raise ConfigError(f"--set {assignment}: the value is not valid YAML with unique keys; quote it") from None
    return merged


def explain(problem: ErrorDetails, settings: Mapping[str, Any]) -> str:
    """Return a description of a problem that pydantic reported, with the field's path as users write it."""
    path = ".".join(_path(problem["loc"], settings)) or "config"
    if problem["type"] == "value_error":
        return "\n".join(f"{path}: {line}" for line in str(problem.get("ctx", {})["error"]).splitlines())
    return f"{path}: {describe(problem)}"


def _path(location: Sequence[int | str], given: Any) -> Iterator[str]:
    """Yield the keys and indices on the path to a value, without the tags that pydantic inserts for union members."""
    for n, part in enumerate(location):
        there = part in given if isinstance(given, Mapping) else isinstance(part, int)
        # The last part may be missing, and a bare name may stand for a section.
        last = n == len(location) - 1
        if there or (last and isinstance(given, Mapping)) or (isinstance(given, str) and part == "name"):
            yield str(part)
        given = cast(Any, given)[part] if there else given


def conversions(given: Any, kept: Any, *path: str) -> Iterator[str]:
    """Yield a message for each value that pydantic converted, such as true to 1 or "5" to 5, except int to float."""
    if isinstance(given, Mapping) and isinstance(kept, Mapping):
        for name in given.keys() & kept.keys():
            yield from conversions(given[name], kept[name], *path, name)
    elif isinstance(given, Sequence) and isinstance(kept, list):
        for n, pair in enumerate(zip(given, kept, strict=True)):
            yield from conversions(*pair, *path, str(n))
    elif isinstance(kept, int | float) and (
        isinstance(given, str)
        or isinstance(given, bool) != isinstance(kept, bool)
        or (isinstance(given, float) and isinstance(kept, int))
    ):
        required = {bool: "true or false", int: "an integer", float: "a number"}[type(kept)]
        yield f"{'.'.join(path)}: expected {required}, got {given!r}"

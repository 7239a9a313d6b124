"""What users write: files of settings and `--set` overrides, and what to tell them when it is refused."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from metaloom.pipeline.config.yaml import parse

_NAMED_SECTIONS = ("env", "algorithm", "baseline", "policy")
"""Sections for which a bare name stands for the section with that name and defaults."""


class ConfigError(ValueError):
    """A configuration was refused; the message names each field, what was found and what is allowed."""


def load_config(path: Path) -> dict[str, Any]:
    """The settings in a YAML or JSON file, not yet validated (JSON is a subset of YAML).

    Raises:
        ConfigError: the file is missing, does not parse, or is not a mapping.
    """
    try:
        settings = parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as YAML or JSON: {error}") from None
    if not isinstance(settings, dict):
        raise ConfigError(f"{path}: found {type(settings).__name__} at the top; required a mapping of RunConfig fields")
    return settings


def override(settings: Mapping[str, Any], assignments: Iterable[str]) -> dict[str, Any]:
    """Settings with `a.b=value` assignments applied; values are read as YAML (numbers, lists, true, null, text).

    Raises:
        ConfigError: an assignment has no "=", an empty key, or reaches into something that is not a section.
    """
    merged: dict[str, Any] = json.loads(json.dumps(settings))
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not all(key.split(".")):
            raise ConfigError(f"--set {assignment}: required KEY=VALUE, for example algorithm.inner_lr=0.05")
        *sections, last = key.split(".")
        target = merged
        for section in sections:
            # `env=NAME` is short for env.name=NAME; keep the short form's meaning when a second override follows.
            if section in _NAMED_SECTIONS and isinstance(target.get(section), str):
                target[section] = {"name": target[section]}
            target = target.setdefault(section, {})
            if not isinstance(target, dict):
                raise ConfigError(f"--set {assignment}: {section} is a value, not a section, so it has no field {last}")
        try:
            target[last] = parse(text)
        except ValueError:
            raise ConfigError(f"--set {assignment}: the value is not valid YAML; quote it") from None
    return merged


def explain(problem: Any) -> str:
    """A problem that pydantic found, as the user knows the field."""
    # pydantic puts the tag of a union (promp) into the path; a user never typed it.
    loc = problem["loc"]
    path = ".".join(str(part) for part in (loc[:1] + loc[2:] if loc[:1] == ("algorithm",) else loc))
    found = problem["input"]
    shown = "" if isinstance(found, dict) else f"; found {found!r}"
    if problem["type"] == "extra_forbidden":
        return f"{path}: unknown key{shown}; see `metaloom recipes --schema` for the keys there are"
    return f"{path or 'config'}: {problem['msg']}{shown}"


def conversions(given: Any, kept: Any, *path: str) -> Iterator[str]:
    """Where pydantic made another value of what was given: 1 of true, 5 of "5". Only integers stand for floats."""
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
        yield f"{'.'.join(path)}: required {required}; found {given!r}"

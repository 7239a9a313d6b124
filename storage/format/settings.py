"""Nested settings as pairs of dotted names and values, as in `--set`."""

from collections.abc import Iterator, Mapping
from typing import Any


def dotted(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and value of every setting; an empty section yields {}."""
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from dotted(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the old and new values of settings that differ, keyed by dotted name; None for absent settings."""
    old, new = ({name: value for name, value in dotted(settings) if value != {}} for settings in (before, after))
    names = sorted(name for name in {*old, *new} if old.get(name) != new.get(name))
    return {name: (old.get(name), new.get(name)) for name in names}

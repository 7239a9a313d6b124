"""Nested settings by names with dots, as `--set` spells them."""

from collections.abc import Iterator, Mapping
from typing import Any


def dotted(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every setting by its full name; a section without settings is one, {}."""
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from dotted(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Compare settings: old and new value of each that differs, by full name in order; None where it is absent."""
    old, new = ({name: value for name, value in dotted(settings) if value != {}} for settings in (before, after))
    names = sorted(name for name in {*old, *new} if old.get(name) != new.get(name))
    return {name: (old.get(name), new.get(name)) for name in names}

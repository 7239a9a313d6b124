"""The error for invalid settings, without pydantic, which help and lists do without."""

import difflib
from collections.abc import Iterable


class ConfigError(ValueError):
    """Raised for an invalid configuration; names each field, the value found and the allowed values."""


def suggestion(found: str, names: Iterable[str]) -> str:
    """Return `; did you mean X?` for a name that resembles others, otherwise ""."""
    by_small_letters = {name.lower(): name for name in names}
    close = difflib.get_close_matches(found.lower(), by_small_letters, n=1)
    return f"; did you mean {by_small_letters[close[0]]}?" if close else ""

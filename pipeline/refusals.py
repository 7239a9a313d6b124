"""The error for invalid input, and the name that was meant. Help and lists import it: no pydantic."""

import difflib
from collections.abc import Iterable


class ConfigError(ValueError):
    """An invalid configuration; the message names each field, the value found and the allowed values."""


def suggestion(found: str, names: Iterable[str]) -> str:
    """End a message with `; did you mean X?` where a name resembles others; otherwise with nothing."""
    by_small_letters = {name.lower(): name for name in names}
    close = difflib.get_close_matches(found.lower(), by_small_letters, n=1)
    return f"; did you mean {by_small_letters[close[0]]}?" if close else ""

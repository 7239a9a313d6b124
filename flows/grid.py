"""Values to try of a setting, as a user writes them: KEY=V1,V2,..."""

from collections.abc import Iterable

from metaloom.flows.errors import UsageError


def parse_grid(assignments: Iterable[str]) -> dict[str, list[str]]:
    """Setting -> values, from `KEY=V1,V2,...`. A comma inside brackets or quotes belongs to its value.

    Raises:
        UsageError: an assignment has no key or no value, or a key comes twice.
    """
    grid: dict[str, list[str]] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        values = split_values(text)
        if not equals or not key or not all(values) or key in grid:
            raise UsageError(
                f"--grid {assignment}: required KEY=V1,V2,... once per KEY, as in algorithm.clip_eps=0.1,0.2"
            )
        grid[key] = values
    return grid


def split_values(text: str) -> list[str]:
    """Values between commas; one inside brackets or quotes belongs to its value."""
    values, depth, quote = [""], 0, ""
    for char in text:
        if quote or char in "\"'":
            quote = "" if char == quote else quote or char
        else:
            depth += (char in "[{") - (char in "]}")
        if char == "," and not depth and not quote:
            values.append("")
        else:
            values[-1] += char
    return values

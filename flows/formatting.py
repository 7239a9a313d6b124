"""Formatting values, times, sizes and stages as text, and converting values to JSON."""

import json
import math
import os
import re
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from metaloom.pipeline.shown import size as size
from metaloom.storage import StageRef
from metaloom.storage.format import settings
from metaloom.storage.format.stages import EARLIER

TRIAL_RETURNS = ("first_episode_return", "last_episode_return")
"""Metrics of algorithms that learn from trials; the two are equal if a trial is a single episode."""
_ONCE = {stage.name for table in EARLIER.values() for stage in table.stages if not stage.stepped}


def stage_name(ref: StageRef) -> str:
    """Format a stage reference without its iteration, such as "adapt k=0" or "meta_optimize"."""
    return stage_label(ref.stage, ref.step)


def stage_label(stage: str, step: int) -> str:
    """Format a stage's name and inner step, such as "adapt k=0"; omit k=0 for built-in stages that never repeat."""
    return stage if stage in _ONCE and not step else f"{stage} k={step}"


def adaptation_returns(metrics: Mapping[str, float]) -> list[float]:
    """Return the average episode return at each inner step."""
    return by_inner_step(metrics, "average_return")


def by_inner_step(metrics: Mapping[str, float], name: str) -> list[float]:
    """Return a metric's value at each inner step; empty if the metric does not exist."""
    values: list[float] = []
    while (key := f"step_{len(values)}.{name}") in metrics:
        values.append(metrics[key])
    return values


def last_return(metrics: Iterable[str]) -> str | None:
    """Return the name of the metric for the average return at the last inner step, or None if there is none."""
    names = [name for name in metrics if re.fullmatch(r"step_\d+\.average_return", name)]
    return max(names, key=lambda name: int(name[5:].partition(".")[0]), default=None)


def trial_length(config: Mapping[str, Any]) -> int:
    """Return the number of episodes per trial from a stored configuration; 1 if memory does not span episodes."""
    return int(config["algorithm"].get("episodes_per_trial", 1))


def trial_returns(metrics: Mapping[str, float]) -> Sequence[float]:
    """Return the average returns of the first and last episodes of trials; empty if a trial is a single episode."""
    found = [metrics[name] for name in TRIAL_RETURNS if name in metrics]
    return found if len(set(found)) == len(TRIAL_RETURNS) else ()


def adaptation_label(k: int, last: int) -> str:
    """Return the label for inner step k in legends and tables; `last` is the last inner step."""
    if last == 0:
        return "return"
    if k == 0:
        return "before adaptation"
    return "after adaptation" if k == last else f"after {plural(k, 'inner step')}"


def plural(number: int, noun: str) -> str:
    """Format a number with a noun, such as "1 step" or "2,000 steps"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def number(value: float) -> str:
    """Format a number with four significant digits or two decimals, whichever is more precise.

    Examples: −20.13, 0.0001234, 100, 1e+18. The minus sign is U+2212; outside a terminal, it is printed as "-".
    """
    if not math.isfinite(value):
        return str(value)
    if value == round(value) and abs(value) < 1e15:
        text = f"{value:,.0f}"
    else:
        text = f"{value:,.2f}" if 10 <= abs(value) < 1e15 else f"{value:.4g}"
    return text.replace("-", "−")


def interval(low: float, high: float, missing: str = "-") -> str:
    """Format an interval as "1.2 to 3.4"; return `missing` if it is undefined."""
    return missing if math.isnan(low) else f"{number(low)} to {number(high)}"


def count(value: float) -> str:
    """Format a large count with three significant digits and a unit letter, such as 950, 39.2 k or 1.92 M."""
    for scale, letter in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(value) >= scale:
            return f"{value / scale:.3g}{letter}"
    return f"{value:.0f}"


def speed(steps_per_second: float | None) -> str:
    """Format a sampling speed, such as "39.2 k steps/s"; None means that nothing had to be sampled."""
    return "rollouts were stored" if steps_per_second is None else f"{count(steps_per_second)} steps/s"


def duration(seconds: float) -> str:
    """Format a duration as hours, minutes and seconds, such as 0:01:03."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def short_time(seconds: float) -> str:
    """Format a short duration, such as 1.93 s or 17.2 ms."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def seconds_of(moment: object, otherwise: float = -math.inf) -> float:
    """Return a stored time in seconds since 1970, or `otherwise` if it is invalid, as in a malformed run."""
    try:
        return datetime.fromisoformat(str(moment)).timestamp()
    except (ValueError, OverflowError):
        return otherwise


def age(moment: object) -> str:
    """Format the age of a stored time, such as "40 s ago" or "2 h ago"; empty if the time is invalid."""
    began = seconds_of(moment)
    if began == -math.inf:
        return ""
    seconds = max(0, int(time.time() - began))
    units = {"d": 86_400, "h": 3_600, "min": 60, "s": 1}
    unit = next((unit for unit, size in units.items() if seconds >= size), "s")
    return f"{seconds // units[unit]} {unit} ago"


def finite(value: float) -> float | None:
    """Return the value, or None if it is not finite."""
    return value if math.isfinite(value) else None


def as_json(value: Any) -> Any:
    """Return nested lists and mappings as JSON data, with None for non-finite numbers."""
    if isinstance(value, Mapping):
        return {name: as_json(part) for name, part in value.items()}
    if isinstance(value, list):
        return [as_json(part) for part in value]
    return finite(value) if isinstance(value, float) else value


def dotted(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Return the settings in a nested configuration as pairs of name and value for `--set`."""
    return (
        (name, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
        for name, value in settings.dotted(config)
    )


def program(name: str) -> str:
    """Return the command for a program of this environment: a relative path if PATH does not find it, else its name."""
    ours = Path(sys.executable).with_name(name)
    found = shutil.which(name)
    # Do not resolve links, since their targets may not be accessible to others.
    if not os.path.lexists(ours) or (found and Path(found).parent == ours.parent):
        return name
    return os.path.relpath(ours)

"""Values to try in grids and searches: lists and ranges, keyed by setting."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from math import inf, isfinite, prod
from typing import TypeAlias

from metaloom.flows.errors import ExtraMissing, UsageError

_WHOLE = r"[+-]?\d+"
_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_RANGE = re.compile(rf"(?P<low>{_NUMBER}):(?P<high>{_NUMBER})(?P<log>:log)?")
_LARGEST_WHOLE = 2**53  # ranges are searched in float64, in which integers up to this one are exact
_NARROWEST = 1e-9  # relative to the larger bound: between closer bounds, float64 has too few values for a search
_EXAMPLES = "a range such as 0.01:0.3, 0.01:0.3:log or 1:10, or a list of two or more values such as tanh,relu"


@dataclass(frozen=True)
class Range:
    """Inclusive range of integers (if `whole` is True) or real numbers, sampled log-uniformly if `log` is True."""

    low: float
    high: float
    log: bool
    whole: bool

    @property
    def size(self) -> float:
        """Number of values; infinite for real numbers."""
        return self.high - self.low + 1 if self.whole else inf

    def text(self, value: float | str) -> str:
        return str(int(value)) if self.whole else repr(float(value))

    def value(self, text: str) -> float:
        """Parse a value formatted by `text`; raise ValueError if it is outside the range."""
        value = int(text) if self.whole else float(text)
        if not self.low <= value <= self.high:
            raise ValueError(f"{text} is not between {self.low} and {self.high}")
        return value

    def probes(self) -> list[str]:
        return [self.text(self.low), self.text(self.high)]


@dataclass(frozen=True)
class Choice:
    """Choice among unordered values, which are stored as text."""

    texts: tuple[str, ...]

    @property
    def size(self) -> float:
        return len(self.texts)

    def text(self, value: float | str) -> str:
        return str(value)

    def value(self, text: str) -> str:
        """Return the text, or raise ValueError if it is not one of the choices."""
        if text not in self.texts:
            raise ValueError(f"{text} is not one of {', '.join(self.texts)}")
        return text

    def probes(self) -> list[str]:
        return [*self.texts]


Dimension: TypeAlias = Range | Choice


@dataclass(frozen=True)
class Search:
    """Hyperparameter search for the highest score."""

    trials: int  # number of combinations of values to try
    metric: str  # `return` after adaptation, `evaluation`, or any other; averaged over a run's last tenth
    space: Mapping[str, str]  # values to try, keyed by setting, in the user's notation

    @cached_property
    def dimensions(self) -> dict[str, Dimension]:
        """Ranges and choices parsed from `space`, keyed by setting."""
        return {key: _dimension(key, text) for key, text in self.space.items()}

    @property
    def size(self) -> float:
        """Number of combinations of values; infinite if a setting is a real number."""
        return prod(dimension.size for dimension in self.dimensions.values())

    def values(self, settings: Mapping[str, str]) -> dict[str, float | str]:
        """Return the values that a trial's settings represent, keyed by setting."""
        if settings.keys() != self.space.keys():
            raise ValueError(f"got settings {[*settings]}; expected {[*self.space]}")
        return {key: dimension.value(settings[key]) for key, dimension in self.dimensions.items()}

    def probes(self) -> list[dict[str, str]]:
        """Return points at which to check the space: each setting at its bounds, or at each of its choices."""
        probes = {key: dimension.probes() for key, dimension in self.dimensions.items()}
        first = {key: texts[0] for key, texts in probes.items()}
        return [first, *(first | {key: text} for key, texts in probes.items() for text in texts[1:])]


def wanted_search(trials: int | None, space: Mapping[str, str], metric: str | None, grid: object) -> Search | None:
    """Return the search that the options request, or None if `trials` is None."""
    if trials is None:
        for option in ["--search"] * bool(space) + ["--metric"] * bool(metric):
            raise UsageError(f"{option} requires --optuna with a number of trials, such as --optuna 20")
        return None
    if grid:
        raise UsageError("--grid cannot be combined with --optuna; use --search KEY=V1,V2 to search listed values")
    return Search(trials, metric or "return", space)


def parse_space(assignments: Iterable[str]) -> dict[str, str]:
    """Parse `KEY=LOW:HIGH[:log]` and `KEY=V1,V2,...`; return the values to try, keyed by setting."""
    space: dict[str, str] = {}
    for assignment in assignments:
        key, _, text = assignment.partition("=")
        if not key or not text:
            raise UsageError(f"--search {assignment}: expected KEY=VALUES with {_EXAMPLES}")
        if key in space:
            raise UsageError(f"--search {key} is given twice; remove one of them")
        space[key] = text
    return space


def _dimension(key: str, text: str) -> Dimension:
    found = f"--search {key}={text}"
    if (given := _RANGE.fullmatch(text)) is None:
        texts = tuple(split_values(text))
        if len(texts) < 2 or not all(texts):
            raise UsageError(f"{found}: expected {_EXAMPLES}")
        if len({*texts}) < len(texts):
            raise UsageError(f"{found} repeats a value; remove one of them")
        return Choice(texts)
    low, high, log = given["low"], given["high"], given["log"] is not None
    whole = all(re.fullmatch(_WHOLE, text) for text in (low, high))
    if whole and any(len(text) > 17 or abs(int(text)) > _LARGEST_WHOLE for text in (low, high)):
        raise UsageError(f"{found}: integers must be at most {_LARGEST_WHOLE:,}")
    bounds = Range(*((int(low), int(high)) if whole else (float(low), float(high))), log=log, whole=whole)
    if not (isfinite(bounds.low) and isfinite(bounds.high) and isfinite(bounds.high - bounds.low)):
        raise UsageError(f"{found}: the bounds and the distance between them must be finite in float64")
    if bounds.low >= bounds.high:
        raise UsageError(f"{found} is empty; the lower bound must be below the upper one (for one value, use --set)")
    if not whole and bounds.high - bounds.low < _NARROWEST * max(abs(bounds.low), abs(bounds.high)):
        raise UsageError(f"{found} is too narrow; the bounds must differ in their first nine digits")
    if log and bounds.low <= 0:
        raise UsageError(f"{found} needs the logarithm of {low}; use a lower bound above 0, or remove :log")
    return bounds


def parse_grid(assignments: Iterable[str]) -> dict[str, list[str]]:
    """Parse `KEY=V1,V2,...` with `split_values`; return the lists of values, keyed by setting."""
    grid: dict[str, list[str]] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        values = split_values(text)
        if not equals or not key or not all(values) or key in grid:
            raise UsageError(f"--grid {assignment}: expected KEY=V1,V2,... once per KEY: algorithm.clip_eps=0.1,0.2")
        grid[key] = values
    return grid


def split_values(text: str) -> list[str]:
    """Split text into values at commas; a comma inside brackets or quotes does not split."""
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


def require_optuna() -> None:
    """Raise ExtraMissing if Optuna is not installed, without importing it."""
    if find_spec("optuna") is None:
        raise ExtraMissing("optuna")

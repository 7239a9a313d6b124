"""Results of recomputing a stage with its run's settings and with changed settings."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from metaloom.flows.errors import UsageError
from metaloom.flows.formatting import as_json, number
from metaloom.pipeline.config.run import RunConfig
from metaloom.pipeline.shown import Row, Shown
from metaloom.pipeline.types import Array, LearnerState, Samples, Update
from metaloom.storage import StageRef
from metaloom.storage.format.codec import Value, flatten


@dataclass(frozen=True)
class Outcome:
    """Output of a recomputed stage, with the settings used."""

    settings: tuple[str, ...]  # changed settings, as for `--set`; empty for the run's settings
    config: RunConfig = field(repr=False)
    value: Value
    seconds: float
    identical: bool  # True if the output is bitwise identical to the stored one
    digests: Mapping[StageRef, str] = field(repr=False)  # digests of all recomputed stages, this one last

    @property
    def learner(self) -> LearnerState:
        """Learner after the update. Raises UsageError if the stage does not return one."""
        if not isinstance(self.value, Update):
            raise UsageError(
                f"a {type(self.value).__name__} has no learner; use the stage that ends an iteration and returns one"
            )
        return self.value.learner


@dataclass(frozen=True, repr=False)
class Counterfactual(Shown):
    """Comparison of a stage recomputed with its run's settings and with changed settings."""

    ref: StageRef
    stored: Outcome
    changed: Outcome
    start: Mapping[str, Array]  # parameters before an update, keyed by name; empty for other stages

    def shown(self) -> tuple[str, list[Row]]:
        pairs = self.quantities().items()
        rows = [(name, *("-" if value is None else number(value) for value in pair)) for name, pair in pairs]
        title = f"Counterfactual of {self.ref} under {', '.join(self.changed.settings) or 'the same settings'}"
        return title, [("quantity", "as stored", "changed"), *rows]

    @property
    def first_changed(self) -> StageRef | None:
        """First stage whose output changed; None if none did."""
        before, after = self.stored.digests, self.changed.digests
        return next((ref for ref in {**before, **after} if before.get(ref) != after.get(ref)), None)

    def quantities(self) -> dict[str, tuple[float | None, float | None]]:
        """Return (stored, changed) values keyed by quantity; None if an outcome lacks the quantity."""
        left, right = (dict(self._describe(outcome)) for outcome in (self.stored, self.changed))
        pairs = {name: (left.get(name), right.get(name)) for name in {**left, **right}}
        # Metrics of inner steps describe the stored episodes, unless processing changed them.
        return {name: pair for name, pair in pairs.items() if not re.match(r"step_\d", name) or pair[0] != pair[1]}

    def distance(self) -> dict[str, float]:
        """Return the L2 distance and the largest absolute difference between the outcomes.

        For updates, both are computed on the policy parameters, and the cosine between the two steps is included.
        """
        left, right = (_numbers(outcome.value) for outcome in (self.stored, self.changed))
        apart = _minus(right, left)
        largest = max((float(np.abs(array).max(initial=0)) for array in apart.values()), default=0.0)
        distance = {"distance": _norm(apart), "max_distance": largest}
        if self.start:
            a, b = _minus(left, self.start), _minus(right, self.start)
            product, length = sum(float((a[name] * b[name]).sum()) for name in a), _norm(a) * _norm(b)
            distance["step_cosine"] = product / length if length else math.nan
        return distance

    def as_dict(self) -> dict[str, Any]:
        return {
            **asdict(self.ref),
            "settings": list(self.changed.settings),
            "as_stored": self.stored.identical,
            "identical": self.changed.identical,
            "first_changed": None if self.first_changed is None else asdict(self.first_changed),
            "quantities": as_json({name: {"stored": s, "changed": c} for name, (s, c) in self.quantities().items()}),
            **as_json(self.distance()),
        }

    def _describe(self, outcome: Outcome) -> Iterator[tuple[str, float]]:
        if isinstance(outcome.value, Update):
            yield from outcome.value.metrics.items()
        else:
            for name, values in _numbers(outcome.value).items():
                yield f"mean {name}", float(values.mean(dtype=np.float64))
                yield f"std {name}", float(values.std(dtype=np.float64))
        if self.start:
            yield "step_length", _norm(_minus(_numbers(outcome.value), self.start))
        yield "seconds", outcome.seconds


def _numbers(value: Value) -> dict[str, Array]:
    """Return the arrays to compare: an update's policy parameters, unpadded samples, or floating-point arrays."""
    if isinstance(value, Update):
        return dict(value.learner.params)
    arrays = flatten(value)
    if isinstance(value, Samples):
        return {name: array[value.mask > 0] for name, array in arrays.items() if name != "mask"}
    return {name: array for name, array in arrays.items() if array.dtype.kind == "f"}


def _minus(left: Mapping[str, Array], right: Mapping[str, Array]) -> dict[str, Array]:
    shared = [name for name in left if name in right]
    return {name: left[name].astype(np.float64) - right[name].astype(np.float64) for name in shared}


def _norm(arrays: Mapping[str, Array]) -> float:
    return math.sqrt(sum(float(np.square(array).sum()) for array in arrays.values()))

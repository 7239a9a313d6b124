"""Task classes: a partition of an environment's tasks, for per-class returns.

Runs record the classes as plain data, so that readers can classify tasks without the environment.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError

from metaloom.pipeline.estimation.statistics import BALANCED, ClassReturns, class_returns
from metaloom.pipeline.types import Array


@dataclass(frozen=True)
class Classes:
    """A partition of tasks into C classes by some of the task fields; see `nearest` and `bins`.

    Attributes:
        fields: Names of the task fields that determine the class.
        names: Class names, in order.
        centers: One point per class, with one value per field. A task belongs to the class with the nearest point, the
            first one in a tie. Empty if `edges` is used.
        edges: Increasing bounds of a single field: class c contains edges[c - 1] <= x < edges[c]. The first class has
            no lower bound, and the last one no upper bound.
        held_out: Names of classes whose tasks are all held out.

    Raises:
        ValueError: the arguments are inconsistent.
    """

    fields: tuple[str, ...]
    names: tuple[str, ...]
    centers: tuple[tuple[float, ...], ...] = ()
    edges: tuple[float, ...] = ()
    held_out: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if problem := self._problem():
            raise ValueError(f"task_classes: {problem}")

    def _problem(self) -> str | None:
        texts: list[Any] = [*self.fields, *self.names]
        of_one_line = all(isinstance(text, str) and text.isprintable() for text in texts)
        if not of_one_line or len({*self.fields}) < len(self.fields):
            return (
                f"got the fields {self.fields} and the names {self.names}; each must be a single line, and fields "
                "must not repeat"
            )
        names = [name.strip() for name in self.names]
        if len(names) < 2 or len({*names}) < len(names) or "" in names or BALANCED in names:
            return f"got the names {self.names}; expected two or more distinct names other than '' and {BALANCED!r}"
        if len({*names} - {*self.held_out}) != len(names) - len(self.held_out) or {*names} <= {*self.held_out}:
            return f"got held_out {self.held_out}; use some, but not all, of the names {self.names}"
        if not np.isfinite([*self.edges, *(x for center in self.centers for x in center)]).all():
            return f"got centers {self.centers} and edges {self.edges}; expected finite numbers"
        if self.edges:
            if self.centers or len(self.fields) != 1 or len(names) != len(self.edges) + 1:
                return (
                    f"got {len(self.edges)} edges for {len(names)} classes by {self.fields}; use one field, and "
                    "one edge fewer than classes"
                )
            increasing = all(low < high for low, high in pairwise(self.edges))
            return None if increasing else f"got edges {self.edges}; they must be increasing"
        sizes = {len(center) for center in self.centers}
        if len(self.centers) != len(names) or sizes != {len(self.fields)} or len({*self.centers}) < len(names):
            return (
                f"got the centers {self.centers}; expected {len(names)} distinct centers, one per class, each with a "
                f"value for every field of {self.fields}"
            )
        return None

    def of(self, params: Array, fields: Sequence[str]) -> Array:
        """Return the class index of each task, [B] int64, given task parameters [B, P] and the P fields' names."""
        if missing := [field for field in self.fields if field not in fields]:
            raise ValueError(f"task_classes: the task fields {[*fields]} lack {missing}, which the classes use")
        chosen = params[:, [[*fields].index(field) for field in self.fields]]
        if self.edges:
            return np.searchsorted(self.edges, chosen[:, 0], side="right").astype(np.int64)
        distances = np.square(chosen[:, None] - np.array(self.centers, np.float64)).sum(axis=2)
        return distances.argmin(axis=1).astype(np.int64)

    def among(self, of: Array) -> Array:
        """Return the indices of the classes, in order, from which tasks with classes `of` [B] can be drawn.

        These are the held-out classes if all tasks belong to them, the other classes if none does, otherwise all.
        """
        numbers = np.arange(len(self.names))
        held_out = np.isin(self.names, self.held_out)
        test = held_out[of]
        if not held_out.any() or (len(of) and test.any() != test.all()):
            return numbers
        return numbers[held_out == (len(of) > 0 and test.all())]

    def returns(self, task_returns: Array, of: Array) -> ClassReturns:
        """Return per-class returns, given the tasks' mean returns [B] and classes `of` [B]."""
        among = self.among(of)
        return class_returns(task_returns, np.searchsorted(among, of), [self.names[c] for c in among])

    def facts(self) -> dict[str, Any]:
        """Return the classes as JSON data."""
        return _PLAIN.dump_python(self, mode="json", exclude_defaults=True)

    @staticmethod
    def from_facts(facts: Mapping[str, Any]) -> "Classes":
        """Restore the classes from the result of `facts`, or raise ValueError if it is invalid."""
        try:
            return _PLAIN.validate_python(facts)
        except ValidationError as problem:
            raise ValueError(f"task_classes: got {facts!r:.200}; expected the result of `Classes.facts`") from problem


_PLAIN = TypeAdapter(Classes)


def nearest(
    fields: str | Sequence[str], centers: Mapping[str, float | Sequence[float]], held_out: Sequence[str] = ()
) -> Classes:
    """Define named classes by points with one number per field. A task belongs to the class with the nearest point.

    Tasks of the classes in `held_out` are all held out.
    """
    points = ((center,) if isinstance(center, int | float) else center for center in centers.values())
    return Classes(
        fields=(fields,) if isinstance(fields, str) else tuple(fields),
        names=tuple(centers),
        centers=tuple(tuple(map(float, point)) for point in points),
        held_out=tuple(held_out),
    )


def bins(field: str, edges: Sequence[float]) -> Classes:
    """Define classes by increasing edges for one task field, with names such as "velocity 1 to 2"."""
    inner = (f"{field} {low:g} to {high:g}" for low, high in pairwise(edges))
    names = (f"{field} below {edges[0]:g}", *inner, f"{field} from {edges[-1]:g}") if edges else ()
    return Classes(fields=(field,), names=names, edges=tuple(map(float, edges)))


ONE_WAY_OR_THE_OTHER = nearest("direction", {"forward": 1, "backward": -1})
QUADRANTS = nearest(("direction_x", "direction_y"), {"+x": (1, 0), "+y": (0, 1), "-x": (-1, 0), "-y": (0, -1)})

"""Stage errors with the data to reproduce them, and the check for finite values."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from metaloom.pipeline.dataflow.refs import StageRef
from metaloom.pipeline.outputs import OutputError, OutputSchema
from metaloom.pipeline.types import Array, EpisodeBatch, Evaluation, Samples, TaskBatch, TaskParams, Update


class StageFault(RuntimeError):
    """Raised when a stage cannot continue because of its data or an environment."""

    def __init__(self, message: str, about: Mapping[str, Any] | None = None, arrays: Mapping[str, Array] | None = None):
        super().__init__(message)
        # Location and circumstances, as plain JSON data: stage, iteration, step, task, episode, ...
        self.about: dict[str, Any] = dict(about or {})
        # Arrays that reproduce the fault, keyed by name and small enough to store.
        self.arrays: dict[str, Array] = dict(arrays or {})

    def __reduce__(self) -> tuple[Any, ...]:
        # Workers pickle faults; by default, a pickled exception keeps only its message.
        return type(self), (str(self), self.about, self.arrays)


_AXES = ("task", "episode", "t")
_NUM_AXES = {"initial_state": 2, "behavior.log_std": 1, "behavior.latent": 2}
"""Number of leading axes, for arrays whose shape is ambiguous."""


class NotFinite(StageFault):
    """Raised for non-finite values in a stage's output; `arrays` holds the whole output."""


def require_finite(ref: StageRef, value: object, arrays: Mapping[str, Array]) -> None:
    """Raise NotFinite unless all arrays in a stage's output are finite. Metrics and facts are not checked.

    The error names the first array that is not finite and, if it has these axes, the task, episode and step.
    """
    if isinstance(value, Update):
        arrays = {name: array for name, array in arrays.items() if not name.startswith("metrics.")}
    for name, array in arrays.items():
        # Facts may be NaN if the environment declares so; the collecting stage has checked them.
        is_fact = name.partition(".")[0].endswith("facts") and isinstance(value, EpisodeBatch | Evaluation)
        if array.dtype.kind != "f" or is_fact:
            continue
        # A sum is four times as fast as checking every value. It can overflow, so every value is checked if the sum is
        # not finite.
        with np.errstate(all="ignore"):
            if np.isfinite(array.sum()) or (finite := np.isfinite(array)).all():
                continue
        index = tuple(int(n) for n in np.argwhere(~finite)[0])
        place = dict(zip(_axes_of(value, name, array), index, strict=False))
        count, found = int((~finite).sum()), str(array[index])
        words = [f"{'step' if axis == 't' else axis} {n}" for axis, n in place.items()]
        raise NotFinite(
            f"{ref.where}: {name} holds {found} at "
            f"{', '.join([*words, f'index {list(index)}'])} ({count} of {array.size} values are not finite); all "
            "must be finite",
            {**ref.document(), **place, "array": name, "index": list(index), "found": found, "count": count},
            arrays,
        )


def _axes_of(value: object, name: str, array: Array) -> Sequence[str]:
    """Return the names of an array's leading axes: task, episode and step, or the axes a custom class declares."""
    if isinstance(value, TaskBatch | TaskParams | Evaluation):
        return _AXES[:1]
    if isinstance(value, EpisodeBatch | Samples):
        steps = value.rewards if isinstance(value, EpisodeBatch) else value.returns
        known = _NUM_AXES.get(name)
        return _AXES[: known or (3 if name == "observations" or array.shape[:3] == steps.shape else 1)]
    try:
        described = OutputSchema.of(type(value)).fields
    except OutputError:  # an Update, or row indices
        return ()
    return next(f.dims for f in described if f.name == name.partition(".")[0])

"""Data about adaptation in an iteration for the page: paths of point robots, and adapted parameters."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from metaloom.flows.formatting import adaptation_label, trial_length
from metaloom.flows.views.series import numbers, shown_steps, steps_note
from metaloom.pipeline.estimation.normalization import without_normalization
from metaloom.pipeline.shown import error_text
from metaloom.pipeline.types import Array, TaskParams
from metaloom.storage import Run, StageMissing, StageRef, StoreError

MOST_TASKS, MOST_EPISODES = 40, 3
"""Maximum number of tasks and episodes whose paths are shown."""
_PLANE = ("x", "y")


def adaptation_page(run: Run, iteration: int) -> dict[str, Any]:
    """Return `ways`, paths before and after adaptation, and `policies`, projected parameters; null if there are none.

    An unreadable part is replaced by the reason, under `problem`.
    """
    ways, policies = either(lambda: _ways(run, iteration)), either(lambda: _policies(run, iteration))
    return {"iteration": iteration, "ways": ways, "policies": policies}


def either(read: Callable[[], Mapping[str, Any] | None]) -> Mapping[str, Any] | None:
    """Return the data, or the reason why they are unreadable."""
    try:
        return read()
    except StoreError as problem:
        return {"problem": error_text(problem)}


def compared_steps(steps: Sequence[int]) -> dict[str, Any]:
    """Choose stored inner steps to compare: `shown`, with labels and colours, and `unshown`, a note."""
    last = max(steps, default=0)
    shown = [{"step": k, "label": adaptation_label(k, last), "color": color} for k, color in shown_steps(last).items()]
    return {"shown": [step for step in shown if step["step"] in steps], "unshown": steps_note(last)}


def _ways(run: Run, iteration: int) -> dict[str, Any] | None:
    """Return positions of point robots by step, for environments whose observations have components `x` and `y`."""
    names = [*run.components("observation")]
    if not {*_PLANE} <= {*names}:
        return None
    columns = [names.index(axis) for axis in _PLANE]
    stage = run.stages.named("rollouts")
    stored = [ref.step for ref in run.refs_of([iteration]) if ref.stage == stage]
    if not stored:
        return None
    last, in_trial = stored[-1], trial_length(run.config)
    # For trials: first and last episodes, ordered as described in docs/algorithms/rl2.md.
    shares = [("return", 0, 1)] if in_trial == 1 else [("first", 0, in_trial), ("last", in_trial - 1, in_trial)]
    rounds = [
        {
            "step": k,
            "label": adaptation_label(k, last) if in_trial == 1 else f"in {label} episodes of trials",
            "tasks": _positions(run, StageRef(iteration, stage, k), columns, share),
        }
        for k in dict.fromkeys((stored[0], last))
        for label, *share in shares
    ]
    # The task's target position, if tasks have one.
    tasks, fields, goals = run[iteration].tasks(), [f"goal_{axis}" for axis in _PLANE], None
    if {*fields} <= {*tasks.names}:
        wanted = [tasks.names.index(field) for field in fields]
        goals = [numbers(params[wanted]) for params in tasks.params[:MOST_TASKS]]
    return {"unit": run.components("observation")["x"], "rounds": rounds, "goals": goals}


def _positions(
    run: Run, ref: StageRef, columns: Sequence[int], share: Sequence[int]
) -> list[list[list[list[float | None]]]]:
    """Read positions of every task in the m-th of n shares of the episodes: [x, y], each with an entry per step."""
    lengths = run.lengths(ref)
    tasks = [*range(min(len(lengths), MOST_TASKS))]
    place, shares = share
    count = lengths.shape[1] // shares
    first = place * count
    group = run.stages.group_of(ref)
    observations = run.files.read_arrays(run.record(ref), ("observations",), tasks)[group]["observations"][0]
    return [
        [
            [numbers(observations[b, e, : lengths[b, e] + 1, column]) for column in columns]
            for e in range(first, first + min(count, MOST_EPISODES))
            if lengths[b, e]
        ]
        for b in tasks
    ]


def _policies(run: Run, iteration: int) -> dict[str, Any] | None:
    """Project every task's adapted parameters on their first two principal components.

    Uses differences from the common learner if its parameters are adapted; otherwise (such as for a posterior) from the
    mean.
    """
    stage = run.stages.named("adapted")
    refs = [ref for ref in run.refs_of([iteration]) if ref.stage == stage]
    if not refs:
        return None
    adapted = [run.load(ref) for ref in refs]
    params = [without_normalization(value.params) for value in adapted if isinstance(value, TaskParams)]
    start = _start(run, iteration, params[0])
    rows = np.stack([_flat(of_step, start) for of_step in params])
    K, B, D = rows.shape
    moved = rows.reshape(K * B, D)
    center = moved.mean(axis=0) if start is None else np.zeros(D)
    plane, shares = principal_components(moved - center)
    return {
        "steps": [ref.step + 1 for ref in refs],
        "from_learner": start is not None,
        "parameters": D,
        "shares": numbers(shares),
        "points": [[numbers(point) for point in of_step] for of_step in plane.reshape(K, B, 2)],
        "distances": [numbers(np.linalg.norm(of_step, axis=1)) for of_step in rows] if start is not None else None,
    }


def principal_components(rows: Array) -> tuple[Array, Array]:
    """Project rows on the two directions of largest variance about the origin, [N, 2]; return also their shares, [2].

    Rows are not centered, since they are differences already.
    """
    # Decompose the Gram matrix [N, N], since parameters outnumber tasks.
    values, vectors = np.linalg.eigh(rows @ rows.T)
    values, found, shares = np.clip(values[::-1], 0, None), np.zeros((len(rows), 2)), np.zeros(2)
    found[:, : len(values)] = vectors[:, ::-1][:, :2] * np.sqrt(values[:2])
    shares[: len(values)] = values[:2] / max(float(values.sum()), 1e-300)
    # Fix the arbitrary sign of a component, so that the page is reproducible.
    signs = np.where(found[np.abs(found).argmax(axis=0), [0, 1]] < 0, -1, 1)
    return found * signs, shares


def _start(run: Run, iteration: int, adapted: Mapping[str, Array]) -> Mapping[str, Array] | None:
    """Return the learner's parameters, if adaptation changes them."""
    try:
        params = run[iteration].learner().params
    except StageMissing:
        return None
    fits = {*adapted} <= {*params} and all(adapted[name].shape[1:] == params[name].shape for name in adapted)
    return params if fits else None


def _flat(adapted: Mapping[str, Array], start: Mapping[str, Array] | None) -> Array:
    """Return every task's parameters minus its initial ones, [B, D] float64."""
    parts = (np.asarray(adapted[name], np.float64) - (0 if start is None else start[name]) for name in sorted(adapted))
    return np.concatenate([part.reshape(len(part), -1) for part in parts], axis=1)

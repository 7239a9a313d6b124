"""Data for the pages about a run, its iterations and its stage outputs."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import quote

import numpy as np

from metaloom.flows.errors import UsageError
from metaloom.flows.formatting import (
    adaptation_label,
    dotted,
    plural,
    program,
    short_time,
    size,
    stage_name,
    trial_length,
)
from metaloom.flows.results.class_returns import classes_of
from metaloom.flows.runs import require_iteration
from metaloom.flows.viewer.values import require_modest
from metaloom.flows.views.diagrams import Arrow, Box, draw
from metaloom.flows.views.run_info import (
    arrays_of,
    class_returns_of,
    iteration_metrics,
    progress_info,
    run_info,
    stage_info,
)
from metaloom.flows.views.series import class_color, numbers, shown_steps, steps_note
from metaloom.pipeline.estimation.normalization import without_normalization
from metaloom.pipeline.shown import error_text
from metaloom.pipeline.types import Array, TaskParams
from metaloom.storage import Run, StageMissing, StageRecord, StageRef, StoreError
from metaloom.storage.format.segments import ranges
from metaloom.storage.read.info import mapping
from metaloom.storage.read.tables import episode_columns, episode_rows

MOST_TASKS, MOST_EPISODES = 40, 3  # maximum number of tasks, and of episodes per task, whose paths are shown
_PLANE = ("x", "y")
_LONGEST_LINE = 30  # maximum number of characters per line in a box of the graph


def adaptation_page(run: Run, iteration: int) -> dict[str, Any]:
    """Return `ways` (paths before and after adaptation) and `policies` (projected parameters) of an iteration.

    Each is None if there is no data. A part that cannot be read is replaced by the reason, under `problem`.
    """
    ways, policies = either(lambda: _ways(run, iteration)), either(lambda: _policies(run, iteration))
    return {"iteration": iteration, "ways": ways, "policies": policies}


def either(read: Callable[[], Mapping[str, Any] | None]) -> Mapping[str, Any] | None:
    """Return the result of `read`; if the data cannot be read, return the reason under `problem`."""
    try:
        return read()
    except (StoreError, UsageError) as problem:
        return {"problem": error_text(problem)}


def _ways(run: Run, iteration: int) -> dict[str, Any] | None:
    """Return positions over time if observations have components `x` and `y`; otherwise None."""
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
    """Return x and y over time, per task and episode, for the m-th of n equal shares of each task's episodes."""
    lengths = run.lengths(ref)
    tasks, (place, shares) = [*range(min(len(lengths), MOST_TASKS))], share
    count = lengths.shape[1] // shares
    group = run.stages.group_of(ref)
    require_modest(run.files.spec(f"{group}/observations"), tasks)
    first, arrays = place * count, run.files.read_arrays(run.record(ref), ("observations",), tasks)
    observations = arrays[group]["observations"][0]

    def path(b: int, e: int) -> list[list[float | None]]:
        return [numbers(observations[b, e, : lengths[b, e] + 1, column]) for column in columns]

    shown = range(first, first + min(count, MOST_EPISODES))
    return [[path(b, e) for e in shown if lengths[b, e]] for b in tasks]


def _policies(run: Run, iteration: int) -> dict[str, Any] | None:
    """Return each task's adapted parameters, projected onto their first two principal components.

    The projected vectors are differences from the learner's parameters if these are adapted, otherwise (for example,
    for a posterior) from the mean.
    """
    stage = run.stages.named("adapted")
    refs = [ref for ref in run.refs_of([iteration]) if ref.stage == stage]
    if not refs:
        return None
    for chunk in (chunk for ref in refs for chunk in run.record(ref).chunks):
        require_modest(run.files.spec(chunk.array), None)
    adapted = map(run.load, refs)
    params = [without_normalization(value.params) for value in adapted if isinstance(value, TaskParams)]
    start: Mapping[str, Array] | None = None
    with suppress(StageMissing):
        learner = run[iteration].learner().params
        # Adaptation changes the learner's parameters if it returns arrays of the same shapes.
        if all(name in learner and each.shape[1:] == learner[name].shape for name, each in params[0].items()):
            start = learner
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
    """Return rows projected onto their first two principal components, [N, 2], and explained variance ratios, [2].

    Rows are not centered, since they are already differences.
    """
    # Decompose the Gram matrix [N, N], since parameters outnumber tasks.
    values, vectors = np.linalg.eigh(rows @ rows.T)
    values, found, shares = np.clip(values[::-1], 0, None), np.zeros((len(rows), 2)), np.zeros(2)
    found[:, : len(values)] = vectors[:, ::-1][:, :2] * np.sqrt(values[:2])
    shares[: len(values)] = values[:2] / max(float(values.sum()), 1e-300)
    # Fix the arbitrary sign of a component, so that the page is reproducible.
    signs = np.where(found[np.abs(found).argmax(axis=0), [0, 1]] < 0, -1, 1)
    return found * signs, shares


def _flat(adapted: Mapping[str, Array], start: Mapping[str, Array] | None) -> Array:
    """Return each task's flattened parameters, minus the initial ones if `start` is not None, [B, D] float64."""
    parts = (np.asarray(adapted[name], np.float64) - (0 if start is None else start[name]) for name in sorted(adapted))
    return np.concatenate([part.reshape(len(part), -1) for part in parts], axis=1)


def live(run: Run) -> dict[str, Any]:
    """Return a run's algorithm, environment, state, progress and newest output. The page polls this."""
    under_way, _ = _records(run, len(run.iterations))
    newest = under_way[-1].ref if under_way else None
    return {
        "path": run.location,
        "created": run.info["created"],
        "seed": run.config.get("seed"),
        **{name: mapping(run.config.get(name)).get("name") for name in ("algorithm", "env")},
        **progress_info(run),
        "newest": None if newest is None else {"iteration": newest.iteration, "label": stage_name(newest)},
    }


def run_page(run: Run) -> dict[str, Any]:
    """Return the page data of a run: the JSON of `metaloom show`, settings for `--set`, stages, and useful commands."""
    fields = ("name", "group", "output", "thinnable")
    return {
        "name": run.path.name,
        "path": run.location,
        "info": either(lambda: run_info(run)),
        "settings": [*dotted(run.config)],
        "stages": [{field: getattr(stage, field) for field in fields} for stage in run.stages.stages],
        "thinned": either(lambda: {"spans": [[r.start, r.stop - 1] for r in ranges(run.thinned_iterations())]}),
        "packed": [[s.iterations.start, s.iterations.stop - 1] for s in run.files.segments.all(refresh=True)],
        "commands": [_command(name, run) for name in ("show", "watch", "report", "replay", "verify")],
    }


def iteration_page(run: Run, iteration: int) -> dict[str, Any]:
    """Return the page data of an iteration: stages with arrays, graph, tasks with returns, and metrics.

    A part that cannot be read is replaced by the reason.
    """
    require_iteration(run, iteration)
    records, problems = _records(run, iteration)
    return {
        "iteration": iteration,
        "last": len(run.iterations) - (not run.files.refs({len(run.iterations)})),
        "complete": iteration in run.iterations,
        "stages": [
            {
                **stage_info(run, record),
                "label": stage_name(record.ref),
                "output": run.stages[record.ref.stage].output,
                "arrays": arrays_of(run, record),
            }
            for record in records
        ],
        "problems": problems,
        "graph": draw_graph(run, records),
        "returns": either(lambda: returns_by_task(run, iteration)),
        "metrics": either(lambda: iteration_metrics(run, iteration)),
        "class_returns": either(lambda: {"rows": class_returns_of(run, iteration)}),
        "commands": [_command(name, run, iteration) for name in ("show", "replay")],
    }


def _records(run: Run, iteration: int) -> tuple[list[StageRecord], list[str]]:
    """Return an iteration's records in the order they are computed, and the errors for unreadable ones."""
    found, problems = list[StageRecord](), list[str]()
    for ref in run.refs_of([iteration]):
        try:
            found.append(run.record(ref))
        except StoreError as problem:
            problems.append(error_text(problem))
    return found, problems


def returns_by_task(run: Run, iteration: int) -> dict[str, Any]:
    """Return the returns of an iteration's episodes per inner step and task.

    They are read from the episodes table, which thinning keeps, or, for an incomplete iteration, from stored rewards.

    Returns:
        `tasks`: parameters keyed by name; `classes`: class of each task, or None; `colors`: color per class; `steps`:
        returns and lengths per inner step, a list of episodes per task; `shown`: inner steps to compare, with labels
        and colors; `unshown`: a note on the others; `trial`: episodes per trial.
    """
    if iteration in run.iterations:
        table = run.episodes(iteration)
        columns = {name: table[name].to_numpy(zero_copy_only=False) for name in table.column_names}
    else:
        columns = _episodes_under_way(run, iteration)
    places = columns["task"]
    firsts = [int(np.flatnonzero(places == b)[0]) for b in range(int(places.max(initial=-1)) + 1)]
    params = {name: columns[name][firsts] for name in columns if name.startswith("task_") and name != "task_id"}
    classes = classes_of(run)
    named, colors = None, dict[str, str]()
    if classes is not None and firsts and {f"task_{field}" for field in classes.fields} <= {*params}:
        found = classes.of(np.stack([params[f"task_{field}"] for field in classes.fields], 1), classes.fields)
        named = [classes.names[c] for c in found]
        # Colors as in the curves, which only include classes with tasks.
        colors = {classes.names[c]: class_color(n) for n, c in enumerate(classes.among(found))}
    steps: dict[int, Any] = {}
    for k in np.unique(columns["step"]).tolist():
        rows = [np.flatnonzero((places == b) & (columns["step"] == k)) for b in range(len(firsts))]
        steps[k] = {
            "returns": [numbers(columns["return"][of_task]) for of_task in rows],
            "lengths": [columns["length"][of_task].tolist() for of_task in rows],
        }
    last = max(steps, default=0)
    compared = ((k, color) for k, color in shown_steps(last).items() if k in steps)
    return {
        "tasks": {name.removeprefix("task_"): numbers(values) for name, values in params.items()},
        "classes": named,
        "colors": colors,
        "steps": steps,
        "shown": [{"step": k, "label": adaptation_label(k, last), "color": color} for k, color in compared],
        "unshown": steps_note(last),
        "trial": trial_length(run.config),
    }


def _episodes_under_way(run: Run, iteration: int) -> dict[str, Array]:
    drawn = run.stages.in_group("tasks", iteration)
    tasks = run[iteration].tasks() if drawn is not None and run.contains(drawn) else None
    parts = [{name: np.empty(0, np.int64) for name in ("step", "task", "return", "length")}]
    for ref in run.refs_of([iteration]):
        if ref.stage == run.stages.named("rollouts"):
            stored = run.files.read_arrays(run.record(ref), ("rewards", "lengths"))[run.stages.group_of(ref)]
            columns = episode_columns({name: array[0] for name, array in stored.items()})
            parts.append(episode_rows(iteration, ref.step, columns, tasks))
    return {name: np.concatenate([part[name] for part in parts if name in part]) for name in parts[-1]}


def output_page(run: Run, ref: StageRef) -> dict[str, Any]:
    """Return the page data of a stage's output: record, inputs, stages that read it, and the command to replay it."""
    record = run.record(ref)
    # Outputs are read in the same iteration; the learner is also read in the next one.
    near = (other for i in (ref.iteration, ref.iteration + 1) for other in _records(run, i)[0])
    return {
        **stage_info(run, record),
        **_ref(ref),
        "output": run.stages[ref.stage].output,
        **{name: getattr(record, name) for name in ("sha256", "previous", "sequence", "config_digest")},
        "seed_position": [*record.seed_position],
        "versions": dict(record.versions),
        "environment": [*dotted(run.environment_of(ref))],
        "inputs": [
            {**_ref(item.ref), "digest": item.digest, "stored": run.contains(item.ref)}
            for item in dict.fromkeys(record.inputs)
        ],
        "read_by": [_ref(other.ref) for other in near if any(item.ref == ref for item in other.inputs)],
        "arrays": arrays_of(run, record),
        "commands": [_command("replay", run, ref.iteration, ref)],
    }


def draw_graph(run: Run, records: Sequence[StageRecord]) -> str:
    """Return an SVG of an iteration's stages and their inputs, with times, sizes and shortened digests."""
    places: dict[object, int] = {}
    boxes: list[Box] = []

    def place(key: object, box: Box) -> None:
        if places.setdefault(key, len(boxes)) == len(boxes):
            boxes.append(box)

    # Place inputs from earlier iterations first.
    own = {record.ref for record in records}
    for record in records:
        for item in record.inputs:
            if item.ref not in own:
                words = (f"iteration {item.ref.iteration}", item.digest[:12])
                place(item.ref, Box(stage_name(item.ref), words, _link(run, item.ref)))
        for span in record.spans:
            stages, reach = ", ".join(span.stages), f"iterations {span.first.iteration} to {span.last.iteration}"
            shown = stages if len(stages) <= _LONGEST_LINE else f"{stages[: _LONGEST_LINE - 1]}…"
            place(span, Box(plural(span.outputs, "output"), (shown, reach)))
    for record in records:
        taken = "thinned" if run.is_thinned(record.ref) else size(record.stored_bytes)
        words = (f"{short_time(record.seconds)}  {taken}", record.digest[:12])
        place(record.ref, Box(stage_name(record.ref), words, _link(run, record.ref)))
    arrows = [
        Arrow(places[source], places[record.ref], dashed=source not in own)
        for record in records
        for source in dict.fromkeys((*(item.ref for item in record.inputs), *record.spans))
        if places[source] < places[record.ref]
    ]
    return draw(boxes, arrows)


def _ref(ref: StageRef) -> dict[str, Any]:
    return {"iteration": ref.iteration, "stage": ref.stage, "step": ref.step, "label": stage_name(ref)}


def _link(run: Run, ref: StageRef) -> str:
    return f"#/run/{quote(run.path.name, safe='')}/output/{ref.iteration}/{ref.stage}/{ref.step}"


def _command(name: str, run: Run, iteration: int | None = None, ref: StageRef | None = None) -> str:
    words = [program("metaloom"), name, run.location if iteration is None else f"{run.location}@{iteration}"]
    if ref is not None:
        words += ["--stage", ref.stage, *(["--step", str(ref.step)] if run.stages[ref.stage].stepped else [])]
    return shlex.join(words)

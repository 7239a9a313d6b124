"""Facts about stored runs as plain data, for JSON and for `flows/views/tables.py`. Does not import torch."""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from metaloom import storage
from metaloom.flows.formatting import adaptation_returns, by_inner_step, dotted, finite
from metaloom.flows.results.class_returns import class_rows, classes_of, headline_returns, returns_by_class
from metaloom.flows.results.run_rows import State
from metaloom.flows.runs import require_settings
from metaloom.pipeline.envs import ENVS, REPRODUCED
from metaloom.pipeline.shown import ConfigError, error_text
from metaloom.storage import Run, StageRef
from metaloom.storage.format.settings import changed
from metaloom.storage.read.committed import bytes_in
from metaloom.storage.read.info import mapping


def run_info(run: Run) -> dict[str, Any]:
    """Return a run's settings, progress, last metrics and disk usage as plain data."""
    done, sizes = len(run.iterations), bytes_by_group(run)
    return {
        "name": run.path.name,
        "path": run.location,
        **progress_info(run),
        "config": dict(run.config),
        "environment": dict(run.info["environment"]),
        "versions": dict(run.info["versions"]),
        "sessions": session_changes(run),
        "system": dict(run.info["system"]),
        "created": run.info["created"],
        "parent": run.info.get("parent"),
        "thinned_iterations": len(run.thinned_iterations()),
        "last_iteration": done - 1 if done else None,
        "witness": _witness(run),
        "last_metrics": iteration_metrics(run, done - 1),
        "last_class_returns": class_returns_of(run, done - 1),
        "bytes": dict(sizes),
        "usage": _usage_of(run, sizes.total()),
        "quarantine": [
            {
                **asdict(entry.ref),
                **{"path": str(entry.path), "message": entry.message, "when": entry.when},
                "arrays": {name: asdict(form) for name, form in entry.forms.items()},
                "about": dict(entry.about),
                "stored_since": run.contains(entry.ref),
            }
            for entry in storage.read_quarantine(run.path)
        ],
    }


def _witness(run: Run) -> dict[str, int] | None:
    """Return the counts of replayed and reproduced witness episodes; None if there are none or they are unreadable."""
    if not (mapping(run.config.get("env")).get("witness") and run.iterations):
        return None
    try:
        table = run.metrics()
    except storage.StoreError:  # `verify` reports it
        return None
    if REPRODUCED not in table.column_names:
        return None
    reproduced = table[REPRODUCED].drop_null().to_numpy()
    return {"replayed": len(reproduced), "reproduced": int(reproduced.sum())}


def changed_settings(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the settings that differ from the algorithm's defaults; all settings for a custom algorithm."""
    from metaloom.pipeline.algorithms import ALGORITHMS
    from metaloom.pipeline.config.run import build_config

    settings, algorithm, env = list(dotted(config)), config["algorithm"]["name"], config["env"]["name"]
    if algorithm not in ALGORITHMS.builtin:  # reading its defaults would run custom code
        return settings
    # Replace a custom environment with a built-in one, so that its code is not run.
    names = {"env": env if env in ENVS else next(iter(ENVS)), "algorithm": algorithm}
    try:
        defaults = dict(dotted(build_config(names).model_dump(mode="json")))
    except ConfigError:
        return settings
    return [(name, value) for name, value in settings if defaults.get(name) != value]


def session_changes(run: Run) -> list[dict[str, Any]]:
    """Return the sessions whose code, plug-ins, kernels, devices or packages differ from the previous session's."""
    known = [(session, {**session.environment, "versions": session.versions}) for session in run.sessions()]
    return [
        {"session": session.number, "started": session.started, "changed": changes}
        for (_, before), (session, after) in pairwise(known)
        if (changes := changed(before, after))
    ]


def iteration_info(run: Run, iteration: int) -> dict[str, Any]:
    """Return an iteration's stored stages in the order they are computed, and its metrics if it is complete."""
    refs = run.refs_of([iteration])
    if not refs:
        run.record(run.last_ref(iteration))  # raises StageMissing, which names the stored stages
    return {
        "run": run.path.name,
        "iteration": iteration,
        "complete": iteration in run.iterations,
        "stages": [stage_info(run, run.record(ref)) for ref in refs],
        "metrics": iteration_metrics(run, iteration),
        "class_returns": class_returns_of(run, iteration),
    }


def stage_info(run: Run, record: storage.StageRecord) -> dict[str, Any]:
    """Return a stored output's start time, duration, inputs, size and digest as plain data."""
    return {
        "stage": record.ref.stage,
        "step": record.ref.step,
        "started": record.started,
        "seconds": record.seconds,
        "session": record.session,
        "bytes": record.stored_bytes,
        "digest": record.digest,
        "thinned": run.is_thinned(record.ref),
        # A witness episode may come from a batch that is also an input, which the record then lists twice.
        "inputs": [{**asdict(item.ref), "digest": item.digest} for item in dict.fromkeys(record.inputs)],
        "spans": [item.as_dict() for item in record.spans],
    }


def output_info(run: Run, ref: StageRef) -> dict[str, Any]:
    """Return the `stage_info` of a stored output together with its type and arrays."""
    stage, record = run.stages[ref.stage], run.record(ref)
    about = {"output": stage.output, "description": stage.description, "arrays": arrays_of(run, record)}
    return {"run": run.path.name, "iteration": ref.iteration, **stage_info(run, record), **about}


def arrays_of(run: Run, record: storage.StageRecord) -> list[dict[str, Any]]:
    """Return the name, axes, shape, dtype, unit and description of each array in an output, or why it is unreadable."""
    found: list[dict[str, Any]] = []
    for chunk in record.chunks:
        group, _, name = chunk.array.partition("/")
        try:
            spec = run.files.spec(chunk.array)
        except storage.StoreError as problem:
            found.append({"group": group, "name": name, "problem": error_text(problem)})
            continue
        about = {"unit": spec.attributes.get("unit", ""), "description": spec.attributes.get("description", "")}
        axes = {"dims": [*spec.dims[1:]], "shape": [*spec.shape], "dtype": spec.dtype, "bytes": chunk.size}
        found.append({"group": group, "name": name, **axes, **about})
    return sorted(found, key=lambda array: (array["group"], array["name"]))


def iteration_metrics(run: Run, iteration: int) -> dict[str, float | None]:
    """Return the metrics of an iteration; {} if it is not complete."""
    metrics = run[iteration].metrics() if iteration in run.iterations else {}
    return {name: finite(value) for name, value in metrics.items()}


def headline_return(run: Run) -> tuple[Sequence[float], str]:
    """Return the mean return per inner step in a run's last complete iteration, and the name of the statistic.

    All views show the return at the last inner step as the run's return. If a table is damaged, the returns are the
    plain means from the metrics.
    """
    if not (iterations := run.iterations):
        return (), ""
    last, by_step = iterations[-1], ()
    with suppress(storage.StoreError):
        by_step = returns_by_class(run, [last], classes_of(run)).get(last, ())
    return headline_returns(adaptation_returns(run[last].metrics()), by_step)


def class_returns_of(run: Run, iteration: int) -> list[dict[str, Any]]:
    """Return JSON rows with a complete iteration's returns per inner step and task class; empty without classes."""
    if iteration not in run.iterations:
        return []
    return class_rows(returns_by_class(run, [iteration], classes_of(run)).get(iteration, ()))


def bytes_by_group(run: Run) -> Counter[str]:
    """Return the size of a run's files in bytes by content type: rollouts, samples, learner, ..., tables, records."""
    sizes: Counter[str] = Counter()
    folders = {"tables": "tables", "_quarantine": "quarantine", "_operator": "log"}
    for path, num_bytes in run.files.sizes().items():
        match path.split("/"):
            case ["data.zarr", group, _, *_] | ["_segments", _, "data.zarr", group, _, *_]:
                sizes[group] += num_bytes
            case parts:
                sizes[folders.get(parts[0], "records")] += num_bytes
    return Counter(dict(sorted(sizes.items())))


def _usage_of(run: Run, disk_bytes: int) -> dict[str, Any] | None:
    """Return a run's resource usage, and the prediction from its first iterations; None if it was not measured."""
    from metaloom.flows.usage import read_usage  # has slow imports, which training needs

    if (usage := read_usage(run.path)) is None:
        return None
    sample = usage.sample
    return {
        "taken": {"memory_bytes": usage.memory_bytes, "disk_bytes": disk_bytes, "seconds": usage.seconds},
        "predicted": sample
        and {
            "memory_bytes": sample.memory_bytes,
            "disk_bytes": sample.disk_bytes(run.capacity),
            "seconds": sample.seconds(run.capacity),
            "after_iterations": sample.iterations,
        },
    }


def list_run_row(folder: Path) -> dict[str, Any]:
    """Return the row of `metaloom ls` for a run; if the run is unreadable, the row contains the reason."""
    row: dict[str, Any] = {"name": folder.name, "path": storage.location(folder), "bytes": bytes_in(folder)}
    try:
        run = storage.open_run(folder)
        require_settings(run)
        row["bytes"] = run.files.num_bytes()
        metrics: dict[str, Any] = {**iteration_metrics(run, len(run.iterations) - 1)}
        (returns, statistic), success = headline_return(run), by_inner_step(metrics, "success_rate")
        return row | {
            **progress_info(run),
            "started": run.info["created"],
            "env": run.config["env"]["name"],
            "algorithm": run.config["algorithm"]["name"],
            "last_return": finite(returns[-1]) if returns else None,
            "last_return_is": statistic if returns else None,
            **({"last_success_rate": success[-1]} if success else {}),
        }
    except (storage.StoreError, OSError, ValueError, KeyError, TypeError) as error:
        state = "unreadable" if isinstance(error, storage.StorageFailed | PermissionError) else "damaged"
        return row | {"state": state, "problem": error_text(error)}


def progress_info(run: Run) -> dict[str, Any]:
    """Return a run's state, writer and number of iterations as plain data."""
    writer = storage.current_writer(run.path, run.files.remote)
    done = {"iterations_done": len(run.iterations), "iterations": run.capacity}
    return {"state": state_of(run, writer), "writer": str(writer) if writer else None, **done}


def state_of(run: Run, writer: storage.Writer | None) -> State:
    """Return the state of a run: training, complete, or how its writer ended."""
    if writer is not None:
        return "training"
    stop, done = run.config.get("stop"), len(run.iterations)
    if done >= run.capacity:
        return "complete"
    if stop is not None:
        # Imported only for runs with stop criteria: it imports pydantic, which takes a fifth of the time of `ls`.
        from metaloom.pipeline.config.sections import StoppingConfig

        # the criteria use only the last iterations
        first = max(0, done - (stop["convergence_window"] or 1))
        if StoppingConfig(**stop).met([run[i].metrics() for i in range(first, done)]):
            return "complete"
    return "killed" if storage.was_killed(run.path, run.files.remote) else "stopped"


def is_complete(folder: Path) -> bool:
    """Return True if a folder contains a complete run."""
    return storage.run_exists(folder) and state_of(storage.open_run(folder), None) == "complete"

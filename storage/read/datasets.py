"""Stored batches as xarray datasets."""

from typing import Any

import xarray as xr

from metaloom.storage.format.codec import Stored
from metaloom.storage.format.layout import dims_of, group_of, plan_of
from metaloom.storage.format.refs import StageRef
from metaloom.storage.read.committed import CommittedFiles


def to_xarray(files: CommittedFiles, iteration: int, k: int) -> xr.Dataset:
    """Episodes of inner step k of an iteration, their samples, and their tasks as coordinates.

    Raises:
        FileNotFoundError: the episodes are not stored.
        DamagedRun: a file is missing or changed.
    """
    variables = _variables(files, StageRef(iteration, "collect_rollouts", k), required=True)
    variables |= _variables(files, StageRef(iteration, "process_samples", k))
    coordinates = _task_coordinates(files, StageRef(iteration, "sample_tasks"))
    return xr.Dataset(variables, coordinates, attrs={"iteration": iteration, "step": k})


def _variables(files: CommittedFiles, ref: StageRef, *, required: bool = False) -> dict[str, xr.Variable]:
    if not required and not files.record_path(ref).exists():
        return {}
    group = group_of(ref)
    arrays: Stored = files.read_arrays(files.record(ref)).get(group, {})
    return {name: _variable(f"{group}/{name}", data) for name, (data, _) in sorted(arrays.items())}


def _variable(path: str, data: Any) -> xr.Variable:
    plan = plan_of(path)
    attributes = {"units": plan.unit, "description": plan.description} if plan else {}
    return xr.Variable(dims_of(path, data.ndim)[1:], data, attributes)


def _task_coordinates(files: CommittedFiles, ref: StageRef) -> dict[str, xr.Variable]:
    if not files.record_path(ref).exists():
        return {}
    arrays = files.read_arrays(files.record(ref))["tasks"]
    params, attributes = arrays["params"]
    fields = zip(attributes["names"], attributes["units"], params.T, strict=True)
    coordinates = {f"task_{name}": xr.Variable(("task",), values, {"units": unit}) for name, unit, values in fields}
    return coordinates | {"task_id": xr.Variable(("task",), arrays["ids"][0], {"units": "1"})}

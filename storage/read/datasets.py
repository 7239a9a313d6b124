"""Stored batches as xarray datasets."""

import xarray as xr

from metaloom.pipeline.types import Array
from metaloom.storage.format.arrays import ArraySpec
from metaloom.storage.format.codec import Stored
from metaloom.storage.read.committed import CommittedFiles

_ATTRIBUTES = {"unit": "units", "description": "description"}


def to_xarray(files: CommittedFiles, iteration: int, k: int) -> xr.Dataset:
    """Episodes of inner step k of an iteration, their samples, and their tasks as coordinates.

    Raises:
        DamagedRun: a file is missing or changed.
    """
    variables = _variables(files, "rollouts", iteration, k) | _variables(files, "samples", iteration, k)
    return xr.Dataset(variables, _task_coordinates(files, iteration), attrs={"iteration": iteration, "step": k})


def _variables(files: CommittedFiles, group: str, iteration: int, k: int) -> dict[str, xr.Variable]:
    return {
        name: xr.Variable(spec.dims[1:], data, {name: spec.attributes[key] for key, name in _ATTRIBUTES.items()})
        for name, (spec, data) in sorted(_arrays(files, group, iteration, k).items())
    }


def _arrays(files: CommittedFiles, group: str, iteration: int, k: int = 0) -> dict[str, tuple[ArraySpec, Array]]:
    ref = files.stages.in_group(group, iteration, k)
    if ref is None or not files.record_path(ref).exists():
        return {}
    path = files.stages.group_of(ref)
    arrays: Stored = files.read_arrays(files.record(ref)).get(path, {})
    return {name: (files.spec(f"{path}/{name}"), data) for name, (data, _) in arrays.items()}


def _task_coordinates(files: CommittedFiles, iteration: int) -> dict[str, xr.Variable]:
    arrays = _arrays(files, "tasks", iteration)
    if not arrays:
        return {}
    spec, params = arrays["params"]
    fields = zip(spec.attributes["names"], spec.attributes["units"], params.T, strict=True)
    coordinates = {f"task_{name}": xr.Variable(("task",), values, {"units": unit}) for name, unit, values in fields}
    return coordinates | {"task_id": xr.Variable(("task",), arrays["ids"][1], {"units": "1"})}

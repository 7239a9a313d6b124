"""Stored batches as xarray datasets."""

from collections.abc import Mapping, Sequence

import xarray as xr

from metaloom.pipeline.types import Array
from metaloom.storage.format.arrays import ArraySpec
from metaloom.storage.format.codec import Stored
from metaloom.storage.read.committed import CommittedFiles

_ATTRIBUTES = {"unit": "units", "description": "description"}


def to_xarray(
    files: CommittedFiles,
    iteration: int,
    k: int,
    tasks: Sequence[int],
    components: Mapping[str, Mapping[str, str]],
    facts: Mapping[str, str],
) -> xr.Dataset:
    """Episodes of some tasks of inner step k of an iteration, their samples, and the tasks as coordinates.

    So are the names of components of the axes `observation` and `action`, with their units as `observation_unit` and
    `action_unit`, where the environment declares them. The variables `facts.NAME` have the
    units that `facts` says.

    Raises:
        DamagedRun: a file is missing or changed.
    """
    rollouts, samples = (_variables(files, group, iteration, k, tasks) for group in ("rollouts", "samples"))
    for fact, unit in facts.items():
        if (name := f"facts.{fact}") in rollouts:
            rollouts[name].attrs["units"] = unit
    coordinates = _task_coordinates(files, iteration, tasks) | _component_coordinates(rollouts, components)
    return xr.Dataset(rollouts | samples, coordinates, attrs={"iteration": iteration, "step": k})


def _variables(
    files: CommittedFiles, group: str, iteration: int, k: int, tasks: Sequence[int]
) -> dict[str, xr.Variable]:
    return {
        name: xr.Variable(spec.dims[1:], data, {name: spec.attributes[key] for key, name in _ATTRIBUTES.items()})
        for name, (spec, data) in sorted(_arrays(files, group, iteration, k, tasks).items())
    }


def _arrays(
    files: CommittedFiles, group: str, iteration: int, k: int, tasks: Sequence[int]
) -> dict[str, tuple[ArraySpec, Array]]:
    ref = files.stages.in_group(group, iteration, k)
    if ref is None or not files.contains(ref):
        return {}
    path = files.stages.group_of(ref)
    arrays: Stored = files.read_arrays(files.record(ref), tasks=tasks).get(path, {})
    return {name: (files.spec(f"{path}/{name}"), data) for name, (data, _) in arrays.items()}


def _component_coordinates(
    variables: Mapping[str, xr.Variable], components: Mapping[str, Mapping[str, str]]
) -> dict[str, xr.Variable]:
    sizes = {axis: size for variable in variables.values() for axis, size in variable.sizes.items()}
    named = {axis: units for axis, units in components.items() if units and sizes.get(axis) == len(units)}
    names = {axis: xr.Variable((axis,), [*units]) for axis, units in named.items()}
    return names | {f"{axis}_unit": xr.Variable((axis,), [*units.values()]) for axis, units in named.items()}


def _task_coordinates(files: CommittedFiles, iteration: int, tasks: Sequence[int]) -> dict[str, xr.Variable]:
    arrays = _arrays(files, "tasks", iteration, 0, tasks)
    if not arrays:
        return {}
    spec, params = arrays["params"]
    fields = zip(spec.attributes["names"], spec.attributes["units"], params.T, strict=True)
    coordinates = {f"task_{name}": xr.Variable(("task",), values, {"units": unit}) for name, unit, values in fields}
    return coordinates | {"task_id": xr.Variable(("task",), arrays["ids"][1], {"units": "1"})}

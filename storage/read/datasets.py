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
    """Return the episodes of tasks at inner step k of an iteration, their samples, and the tasks as coordinates.

    So are the names of components of the axes `observation` and `action`, with their units as `observation_unit` and
    `action_unit`, where the environment declares them. The variables `facts.NAME` have the
    units that `facts` says.

    Raises:
        DamagedRun: a file is missing or changed.
    """
    rollouts, samples = (
        {
            name: xr.Variable(spec.dims[1:], data, {name: spec.attributes[key] for key, name in _ATTRIBUTES.items()})
            for name, (spec, data) in sorted(_arrays(files, group, iteration, k, tasks).items())
        }
        for group in ("rollouts", "samples")
    )
    for fact, unit in facts.items():
        if (name := f"facts.{fact}") in rollouts:
            rollouts[name].attrs["units"] = unit
    coordinates: dict[str, xr.Variable] = {}
    if arrays := _arrays(files, "tasks", iteration, 0, tasks):
        spec, params = arrays["params"]
        for name, unit, values in zip(spec.attributes["names"], spec.attributes["units"], params.T, strict=True):
            coordinates[f"task_{name}"] = xr.Variable(("task",), values, {"units": unit})
        coordinates["task_id"] = xr.Variable(("task",), arrays["ids"][1], {"units": "1"})
    sizes = {axis: size for variable in rollouts.values() for axis, size in variable.sizes.items()}
    named = {axis: units for axis, units in components.items() if units and sizes.get(axis) == len(units)}
    coordinates |= {axis: xr.Variable((axis,), [*units]) for axis, units in named.items()}
    coordinates |= {f"{axis}_unit": xr.Variable((axis,), [*units.values()]) for axis, units in named.items()}
    return xr.Dataset(rollouts | samples, coordinates, attrs={"iteration": iteration, "step": k})


def _arrays(
    files: CommittedFiles, group: str, iteration: int, k: int, tasks: Sequence[int]
) -> dict[str, tuple[ArraySpec, Array]]:
    ref = files.stages.in_group(group, iteration, k)
    if ref is None or not files.contains(ref):
        return {}
    path = files.stages.group_of(ref)
    arrays: Stored = files.read_arrays(files.record(ref), tasks=tasks).get(path, {})
    return {name: (files.spec(f"{path}/{name}"), data) for name, (data, _) in arrays.items()}

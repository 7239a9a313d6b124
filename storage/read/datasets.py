"""Stored batches as xarray datasets."""

from collections.abc import Sequence

import xarray as xr

from metaloom.pipeline.dataflow.refs import StageRef
from metaloom.pipeline.types import Array
from metaloom.storage.format.arrays import ArraySpec
from metaloom.storage.format.codec import Stored
from metaloom.storage.read.committed import CommittedFiles
from metaloom.storage.read.outputs import StoredOutputs

_ATTRIBUTES = {"unit": "units", "description": "description"}


def to_xarray(
    run: StoredOutputs, refs: Sequence[StageRef], drawn: StageRef | None, tasks: Sequence[int] | None
) -> xr.Dataset:
    """Return the arrays of an inner step's outputs as a dataset, with task parameters as coordinates.

    If the environment declares components, their names are coordinates of the axes `observation` and `action`, with
    units in `observation_unit` and `action_unit`. Variables `facts.NAME` have their declared units. `drawn` refers to
    the iteration's tasks, if they are stored.
    """
    files = run.files
    found = {
        name: xr.Variable(spec.dims[1:], data, {name: spec.attributes[key] for key, name in _ATTRIBUTES.items()})
        for ref in refs
        for name, (spec, data) in sorted(_arrays(files, ref, tasks).items())
    }
    for fact, unit in run.facts.items():
        if (name := f"facts.{fact}") in found:
            found[name].attrs["units"] = unit
    sizes = {axis: size for variable in found.values() for axis, size in variable.sizes.items()}
    coordinates: dict[str, xr.Variable] = {}
    # An evaluation's tasks are not the iteration's.
    if drawn is not None and "task" in sizes and all(files.stages[ref.stage].output != "Evaluation" for ref in refs):
        arrays = _arrays(files, drawn, tasks)
        spec, params = arrays["params"]
        for name, unit, values in zip(spec.attributes["names"], spec.attributes["units"], params.T, strict=True):
            coordinates[f"task_{name}"] = xr.Variable(("task",), values, {"units": unit})
        coordinates["task_id"] = xr.Variable(("task",), arrays["ids"][1], {"units": "1"})
    components = ((axis, run.components(axis)) for axis in ("observation", "action"))
    named = {axis: units for axis, units in components if units and sizes.get(axis) == len(units)}
    coordinates |= {axis: xr.Variable((axis,), [*units]) for axis, units in named.items()}
    coordinates |= {f"{axis}_unit": xr.Variable((axis,), [*units.values()]) for axis, units in named.items()}
    about = {"iteration": refs[0].iteration, "step": refs[0].step}
    description = files.stages[refs[-1].stage].description
    return xr.Dataset(found, coordinates, attrs={**about, **({"description": description} if description else {})})


def _arrays(files: CommittedFiles, ref: StageRef, tasks: Sequence[int] | None) -> dict[str, tuple[ArraySpec, Array]]:
    path = files.stages.group_of(ref)
    arrays: Stored = files.read_arrays(files.record(ref), tasks=tasks).get(path, {})
    return {name: (files.spec(f"{path}/{name}"), data) for name, (data, _) in arrays.items()}

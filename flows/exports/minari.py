"""Export of a run's episodes to a Minari dataset (https://minari.farama.org) in HDF5. Needs the extra `minari`."""
# h5py's low-level modules are compiled and have no types.
# pyright: reportAttributeAccessIssue=false

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import gymnasium
import h5py
import minari
import numpy as np
from h5py import h5a, h5d, h5g, h5p, h5s, h5t
from minari.dataset.minari_storage import MinariStorage

from metaloom.flows.exports import ExportFormat
from metaloom.flows.graph.run_stages import config_of
from metaloom.flows.runs import require_settings
from metaloom.pipeline.envs.facts import space_from, taken_space
from metaloom.pipeline.envs.registry import make_env
from metaloom.pipeline.envs.wrappers import ActionSpace, action_map
from metaloom.pipeline.types import Array, EpisodeBatch, TaskBatch
from metaloom.storage import Run
from metaloom.storage.export import Export
from metaloom.storage.run import Iterations

Episode = tuple[dict[str, Array], dict[str, float]]
"""Arrays of an episode, and its options: location in the run, task and facts."""


def export_minari(
    run: Run, folder: Path, done: Export, *, iterations: Iterations = None, steps: Sequence[int] | None = None
) -> None:
    """Write the episodes, in sampling order, as the dataset `NAME-v0` in the folder.

    Actions are stored as the environment received them: mapped by `env.action_scale` and clipped to its bounds.
    An episode's `options` contain its iteration, inner step, task and episode index, task id, parameters and facts.
    """
    require_settings(run)
    # Minari would join a relative path to its own folder.
    data = folder.resolve() / dataset_id(run) / "data"
    data.mkdir(parents=True)
    observations, actions = _spaces(run)
    storage, num_steps = MinariStorage.new(data, observations, actions, data_format="hdf5"), 0
    # Minari itself makes every array resizable, which takes several times as long and 50% more space.
    with h5py.File(data / "main_data.hdf5", "w", libver=("v108", "v110")) as file:  # HDF5 1.10
        for number, (arrays, options) in enumerate(_episodes(run, done, iterations, steps, actions)):
            length = len(arrays["rewards"])
            about = {f"options/{name}": value for name, value in options.items()}
            _write_group(file, f"episode_{number}", arrays, {"id": number, **about, "total_steps": length})
            num_steps += length
    storage.update_metadata(
        {
            "total_episodes": done.rows,
            "total_steps": num_steps,
            "dataset_size": storage.get_size(),
            "dataset_id": dataset_id(run),
            "minari_version": minari.__version__,
            "algorithm_name": run.config["algorithm"]["name"],
            "description": f"Episodes of the run {run.name} on {run.config['env']['name']}",
            "requirements": [],
        }
    )


def dataset_id(run: Run) -> str:
    """Return the dataset's name: the run's name with characters that Minari rejects replaced, and "-v0"."""
    return re.sub(r"[^\w-]", "-", run.name, flags=re.ASCII) + "-v0"


def _spaces(run: Run) -> tuple[gymnasium.Space[Any], ActionSpace]:
    # Read the spec of the whole array, since an iteration may be thinned.
    found = run.files.spec("rollouts_0/observations")
    # Use the recorded space, since an export should not import the environment.
    about = run.info["environment"].get("env", {})
    if "actions_taken" in about:
        actions = space_from(about["actions_taken"])
    else:  # not recorded by earlier versions
        with closing(make_env(config_of(run).env)) as env:
            actions = taken_space(env)
    kept = np.dtype(found.dtype)
    low, high = (-np.inf, np.inf) if kept.kind == "f" else (np.iinfo(kept).min, np.iinfo(kept).max)
    return gymnasium.spaces.Box(low, high, found.shape[3:], kept.type), actions


def _episodes(
    run: Run, done: Export, iterations: Iterations, steps: Sequence[int] | None, actions: ActionSpace
) -> Iterator[Episode]:
    for i, inner_steps in done.available(run, iterations, steps):
        tasks = run[i].tasks()
        # A fork's action scale may differ from its parent's.
        taken = action_map(actions, run.config_of(run.last_ref(i))["env"]["action_scale"])
        for k in inner_steps:
            batch = run[i].rollouts(k)
            for episode in _of_round(i, k, tasks, batch, taken(batch.actions).astype(actions.dtype)):
                done.rows += 1
                yield episode


def _of_round(iteration: int, k: int, tasks: TaskBatch, episodes: EpisodeBatch, actions: Array) -> Iterator[Episode]:
    for b, e in np.ndindex(episodes.lengths.shape):
        T = int(episodes.lengths[b, e])
        if T == 0:  # an empty slot
            continue
        last = np.arange(T) == T - 1
        fields = {f"task_{name}": float(value) for name, value in zip(tasks.names, tasks.params[b], strict=True)}
        arrays = {
            "observations": episodes.observations[b, e, : T + 1],
            "actions": actions[b, e, :T],
            "rewards": episodes.rewards[b, e, :T],
            "terminations": last & bool(episodes.terminated[b, e]),
            "truncations": last & bool(episodes.truncated[b, e]),
        }
        place = {"iteration": iteration, "step": k, "task": b, "episode": e, "task_id": int(tasks.ids[b])}
        in_steps = ("lengths", "terminated", "truncated")  # they follow from Minari's own per-step arrays
        others = {name: values[b, e].item() for name, values in episodes.each_episode.items() if name not in in_steps}
        facts = {f"fact_{name}": values[b, e].item() for name, values in episodes.episode_facts.items()}
        yield arrays, {**place, **fields, **others, **facts}


_LARGEST_COMPACT = 60_000
"""Maximum size in bytes of an array that is stored in its dataset's header, which HDF5 limits to 64 kB."""

_MOST_ATTRIBUTES = 1000


def _write_group(file: h5py.File, name: str, arrays: Mapping[str, Array], attributes: Mapping[str, float]) -> None:
    """Write arrays and scalar attributes as an HDF5 group, with fast low-level calls."""
    group = h5g.create(file.id, name.encode(), None, _group())
    for key, value in attributes.items():
        number = np.asarray(value)
        kind = _type_of(number.dtype)
        h5a.create(group, key.encode(), kind, _space_of(())).write(number, kind)
    for key, array in arrays.items():
        values = np.ascontiguousarray(array)
        kind = _type_of(values.dtype)
        layout = _layout(values.nbytes <= _LARGEST_COMPACT)
        h5d.create(group, key.encode(), kind, _space_of(values.shape), layout).write(h5s.ALL, h5s.ALL, values, kind)


@cache
def _group() -> Any:
    group = h5p.create(h5p.GROUP_CREATE)
    # For more than eight attributes, HDF5 would create an index that is larger than the attributes.
    group.set_attr_phase_change(_MOST_ATTRIBUTES, 0)
    group.set_obj_track_times(False)
    return group


@cache
def _layout(compact: bool) -> Any:
    layout = h5p.create(h5p.DATASET_CREATE)
    layout.set_layout(h5d.COMPACT if compact else h5d.CONTIGUOUS)
    layout.set_obj_track_times(False)  # no timestamps, so the same run gives the same file
    return layout


@cache
def _type_of(dtype: np.dtype[Any]) -> Any:
    return h5t.py_create(dtype)


@cache
def _space_of(shape: tuple[int, ...]) -> Any:
    return h5s.create_simple(shape) if shape else h5s.create(h5s.SCALAR)


FORMAT = ExportFormat(export_minari, holds_episodes=True)

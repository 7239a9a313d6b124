"""Locations of runs. Users refer to a run by its name in the runs folder or by a path, optionally with `@ITERATION`."""

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from operator import index
from pathlib import Path

from metaloom import storage
from metaloom.flows.errors import UsageError
from metaloom.flows.formatting import last_return
from metaloom.pipeline.types import LearnerState, Update

RunLike = str | Path | storage.Run  # opened run, or a run's path, URL or name in the runs folder

_ITERATION = "latest|best|-?[0-9]{1,8}"  # pattern of what may follow the @


def runs_root() -> Path:
    """Return the runs folder: $METALOOM_RUNS, or `runs` in the working directory if the variable is empty or not set.

    If the variable is a URL, this is the URL's cache folder.
    """
    return storage.folder_of(os.environ.get("METALOOM_RUNS") or "runs")


def run_folder(name_or_path: str | Path) -> Path:
    """Return the folder that a name or path refers to, which need not exist."""
    if isinstance(name_or_path, str) and (at := re.fullmatch(f"([^/@]+)@({_ITERATION})", name_or_path)):
        raise UsageError(f"{name_or_path}: expected a run without an iteration; use {at[1]}")
    return storage.run_path(name_or_path, runs_root())


def folder_of(run: RunLike) -> Path:
    """Return the folder of a run, which need not exist."""
    return run.path if isinstance(run, storage.Run) else run_folder(run)


def report_path(run: Path) -> Path:
    """Return the path of a run's report: in `reports`, beside the run or, for a URL, in the working directory."""
    return (Path("reports") if storage.url_of(run) else run.parent / "reports") / run.name


def report_folder(run: Path) -> Path:
    """Return the folder for a run's report; raise UsageError if it, its parent or a file in it is a symbolic link."""
    folder = report_path(run)
    for path in (folder.parent, folder, *(folder.iterdir() if folder.is_dir() else ())):
        if path.is_symlink():  # the target would be overwritten
            raise UsageError(
                f"{path} is a symbolic link, but reports need a folder. Remove the link, or "
                f"choose another folder: `metaloom report {storage.argument(run)} --out FOLDER`"
            )
    return folder


def new_run_name(recipe: str) -> str:
    """Return an unused name for a new run, derived from the recipe's name and the current time."""
    stem = f"{recipe}-{datetime.now():%Y%m%d-%H%M%S}"
    names = [stem, *(f"{stem}-{n}" for n in range(2, 100))]
    return next(name for name in names if not run_folder(name).exists())


def require_iteration(run: storage.Run, iteration: int) -> None:
    """Raise StageMissing if an iteration has no stored outputs; the message names the command that computes it."""
    if all(ref.iteration != iteration for ref in run.refs()):
        done, more = len(run.iterations), f" --iterations {iteration + 1}" if iteration >= run.capacity else ""
        raise storage.StageMissing(
            run.path,
            found=f"no output of iteration {iteration} is stored; complete iterations: {done}",
            required=f"an iteration from 0 to {done - 1}" if done else "an iteration that has begun",
            action=f"`metaloom resume {storage.argument(run.path)}{more}` computes it",
        )


def require_settings(run: storage.Run) -> None:
    """Raise IncompatibleFormat if a run's settings have no environment name, algorithm name or seed."""
    for section in ("env", "algorithm"):
        settings = run.config.get(section)
        if not isinstance(settings, dict) or not isinstance(settings.get("name"), str):
            raise storage.IncompatibleFormat(
                run.path / "run.json",
                found=f"a configuration without {section}.name",
                required="the configuration of a training run",
                action="`metaloom verify` and the Python API read what is stored",
            )
    if not isinstance(run.config.get("seed"), int):
        raise storage.IncompatibleFormat(
            run.path / "run.json",
            found=f"the seed {run.config.get('seed')!r}",
            required="an integer",
            action="Restore run.json from a copy of the run",
        )


def updates_at(run: storage.Run, iteration: int | None) -> int:
    """Return the number of updates of the learner with which an iteration starts; None and -1 select the newest."""
    newest = len(run.iterations)
    iteration = None if iteration is None else index(iteration)
    updates = newest if iteration is None else iteration if iteration >= 0 else newest + 1 + iteration
    if updates < 0:
        raise UsageError(f"{run.path}: no iteration {iteration}; choose one from {-newest - 1} to {newest}")
    return updates


def learner_after(run: storage.Run, updates: int) -> LearnerState:
    """Return the stored learner after this number of updates; raise UsageError if it is not stored."""
    ref = run.learner_ref(updates)
    if not run.contains(ref):
        raise UsageError(
            f"{run.path}: no learner after {updates} updates; the run has completed only "
            f"{len(run.iterations)}. `metaloom resume {storage.argument(run.path)} --iterations {updates}` adds more"
        )
    update = run.load(ref)
    assert isinstance(update, Update)
    return update.learner


def check_seed(seed: int) -> int:
    """Return a valid seed as a Python integer; raise UsageError if it is invalid."""
    found: object = seed
    with suppress(TypeError):
        found = index(seed)
        if 0 <= found < 2**63:
            return found
    raise UsageError(f"seed must be an integer from 0 to 2**63 - 1, got {found!r}")


def parse_span(option: str, text: str) -> slice | int:
    """Parse the value `7` or `A:B` of an option as a Python index or slice."""
    if re.fullmatch(r"-?\d{1,8}", text):
        return int(text)
    if not re.fullmatch(r"(-?\d{1,8})?:(-?\d{1,8})?", text):
        raise UsageError(f"{option} {text}: expected N or FROM:TO, such as 0:100 or -10:")
    start, stop = (int(part) if part else None for part in text.split(":"))
    return slice(start, stop)


def best_iteration(run: storage.Run) -> int:
    """Return the first iteration with the highest mean return, after adaptation if there is any.

    The learner with which the iteration starts is the one that achieved this return.
    """
    table = run.metrics()
    name = last_return(table.column_names)
    if name is None:
        raise UsageError(f"{run.path}: the metrics contain no returns; pass an iteration number")
    returns = table[name].to_pylist()
    return int(table["iteration"].to_pylist()[returns.index(max(returns))])


def from_start(folder: Path, iteration: int, *, learner: bool = False) -> int:
    """Return an iteration's index from the start; a negative iteration is counted from the end."""
    if iteration >= 0:
        return iteration
    run = storage.open_run(folder)
    if learner:
        return updates_at(run, iteration)
    if (done := len(run.iterations)) < -iteration:
        raise UsageError(f"{run.location}@{iteration}: {done:,} iterations complete; expected at least {-iteration}")
    return done + iteration


@dataclass(frozen=True)
class RunAt:
    """A run, or one of its iterations, as specified by a user."""

    path: Path
    iteration: int | None

    @classmethod
    def of(cls, run: RunLike, iteration: int | None = None, *, learner: bool = False) -> "RunAt":
        """Resolve a run and an optional iteration; a string may be RUN@ITERATION, see `parse`."""
        if iteration is None and isinstance(run, str):
            return cls.parse(run, learner=learner)
        folder = folder_of(run)
        return cls(folder, None if iteration is None else from_start(folder, index(iteration), learner=learner))

    @classmethod
    def parse(cls, text: str, *, learner: bool = False) -> "RunAt":
        """Parse RUN or RUN@ITERATION, where ITERATION is a number, `latest` or `best`.

        Negative numbers count from the end, `latest` is -1, and `best` is the iteration with the highest return. If
        `learner` is True, N selects the learner after N updates, with which iteration N starts.
        """
        name, at, iteration = text.rpartition("@")
        if not at or "/" in iteration:  # the "@" belongs to the path
            return cls(run_folder(text), None)
        if not re.fullmatch(_ITERATION, iteration):
            raise UsageError(
                f"{text}: got {iteration!r} after the @; expected an iteration, `best` or `latest`, as in {name}@12"
            )
        folder = run_folder(name)
        if iteration == "best":
            return cls(folder, best_iteration(storage.open_run(folder)))
        return cls(folder, from_start(folder, -1 if iteration == "latest" else int(iteration), learner=learner))


def require_one_iteration(run: RunLike, iteration: int | None) -> tuple[Path, int]:
    """Return a run's folder and the requested iteration; raise UsageError if no iteration is given."""
    at = RunAt.of(run, iteration)
    if at.iteration is None:
        raise UsageError(f"{at.path}: no iteration given; use RUN@ITERATION, such as {at.path.name}@0")
    return at.path, at.iteration


def folders_of(runs: RunLike | Sequence[RunLike]) -> list[Path]:
    return [folder_of(run) for run in ([runs] if isinstance(runs, RunLike) else runs)]

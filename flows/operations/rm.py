"""`rm`: permanently removes runs."""

from pathlib import Path
from typing import Any

from metaloom import storage
from metaloom.flows.arguments import checked
from metaloom.flows.errors import UsageError
from metaloom.flows.operations.options import RemovedArguments
from metaloom.flows.results.disk import Removed, bytes_freed
from metaloom.flows.runs import folders_of, run_folder, runs_root
from metaloom.flows.views.status import STATUS
from metaloom.storage import StoreError


@checked
def rm(runs: RemovedArguments = ()) -> Removed:
    """Permanently remove runs after asking for confirmation.

    Without RUN, it finishes interrupted removals. Forks keep the files that they share with a removed run. Runs that
    are being trained, folders with other content, links, and runs in object storage are refused. Reports beside the run
    are kept.

    Example: `metaloom rm second --yes`

    Args:
        runs: Runs to remove. In Python, they are removed without asking.
    """
    paths = list(dict.fromkeys(map(check_removable, folders_of(runs))))
    freed = bytes_freed(paths)
    for n, path in enumerate(paths, 1):
        STATUS.far(f"run {n} of {len(paths)}")
        storage.remove_run(path)
    roots = dict.fromkeys([path.parent for path in paths] or [runs_root()])
    return Removed(tuple(paths), freed, tuple(path for root in roots for path in storage.finish_removals(root)))


def check_removable(path: Path) -> Path:
    """Return a run's folder if the run may be removed; raise UsageError or StoreError otherwise."""
    if url := storage.url_of(path):
        raise UsageError(
            f"cannot remove {url}, which is not a local folder. Remove the objects with the store's own tools, such as "
            f"`aws s3 rm --recursive {url}`, and then the cache, {path} and {path.parent / f'.{path.name}.log'}"
        )
    return storage.check_removable(path)


def dependents(path: Path, root: Path) -> list[str]:
    """Return lines that describe how other runs in a folder depend on a run."""
    run = _readable(path)
    others = [other for folder in storage.find_runs(root) if (other := _readable(folder)) is not None]
    lines: list[str] = []
    for other in others if run is not None else ():
        parent, start = other.info.get("parent"), other.config.get("init_from")
        if isinstance(parent, dict) and run is not None and parent.get("id") == run.info["id"]:
            lines.append(f"{other.name} is a fork of it and keeps everything they share")
        if _names(start, path):
            lines.append(
                f"{other.name} started from its learner and stores a copy of it, but its first stage could no longer "
                "be replayed"
            )
    return lines


def _names(start: Any, path: Path) -> bool:
    """Return True if a warm start's `init_from` setting names the run in a folder."""
    try:
        return isinstance(start, dict) and run_folder(str(start["run"])).resolve() == path.resolve()
    except (KeyError, StoreError):
        return False


def _readable(path: Path) -> storage.Run | None:
    try:
        return storage.open_run(path)
    except StoreError:
        return None

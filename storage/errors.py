"""Errors of stored runs. Every message says where, what was found, what is required and what helps."""

import os
import shlex
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

_TOP = ("run.json", "writer.lock", "_commits", "_sessions", "_thinned", "_segments", "data.zarr", "tables")


class StoreError(Exception):
    """A run could not be read or written.

    Args:
        where: File, folder or stage concerned.
        found: Actual state.
        required: Expected state.
        action: Suggested next step.
    """

    def __init__(self, where: object, *, found: str, required: str, action: str) -> None:
        super().__init__(str(where), found, required, action)
        self.where: str = str(where)
        self.found = found
        self.required = required
        self.action = action

    def __str__(self) -> str:
        return f"{self.where}: {self.found}; required: {self.required}. {self.action}"

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword-only arguments do not survive the default pickling, and workers send errors home.
        said = {"found": self.found, "required": self.required, "action": self.action}
        return partial(type(self), self.where, **said), ()


class RunNotFound(StoreError, FileNotFoundError):
    """No folder of that name."""


class NotARun(StoreError):
    """A folder, but not one that holds a run."""


class InvalidRunName(StoreError, ValueError):
    """A name that no run can have."""


class RunExists(StoreError, FileExistsError):
    """A run would have been created over something that is already there."""


class RunLocked(StoreError):
    """Another process writes this run."""


class FencedOut(StoreError):
    """This writer lost the run to a later one; nothing it writes counts any more."""


class StageMissing(StoreError, LookupError):
    """A stage's output was asked for that is not stored."""


class StageThinned(StageMissing):
    """A stage's arrays were removed on purpose. Its record says how to compute them again."""


class DigestMismatch(StoreError):
    """A thinned output came out with other bits than it had."""


class BudgetReached(StoreError):
    """The next output would make the run larger than its configuration allows."""


class StageExists(StoreError):
    """A stage's output was given twice; outputs are immutable."""


class LayoutMismatch(StoreError, ValueError):
    """A batch does not fit the arrays that earlier iterations of the run created, or cannot be stored at all."""


class DamagedRun(StoreError):
    """A stored file is missing, cut short or changed."""


class IncompatibleFormat(StoreError):
    """The run was written in a format that this version does not read."""


class StorageFailed(StoreError):
    """The system refused to read or write: no space, no permission, no such disk. Its OSError is the `__cause__`."""


def damaged(where: Path, found: str) -> DamagedRun:
    """Make the error for a file that is not what was written."""
    run, depth = _run_around(where)
    # All files can be restored from the rest of the run, except a folder or a path occupied by one.
    lost = depth <= 1 and where.name != "run.json"
    return DamagedRun(
        where,
        found=found,
        required="the bytes that were committed",
        action=f"`metaloom verify {run}` lists all damage; "
        + ("restore it from a copy of the run" if lost else f"`metaloom resume {run} --repair` repairs it"),
    )


def linked(where: Path) -> DamagedRun:
    """Make the error for a symbolic link in a run, such as DVC, git-annex and the caches of hubs leave there."""
    return DamagedRun(
        where,
        found="is a symbolic link",
        required="a run of regular files and folders",
        action=f"`cp -rL {_run_around(where)[0]} COPY` makes a run of the files that the links of DVC, git-annex or a "
        "hub's cache lead to",
    )


def _run_around(where: Path) -> tuple[str, int]:
    """Return the run that contains a path, as a command argument, and the path's depth in it; 0 for the run."""
    parts = where.absolute().parts
    # The innermost, because the folder of all runs may have such a name too; but a segment has folders of all kinds.
    inner = {"_segments"} & {*parts} or _TOP
    top = max((i for i, part in enumerate(parts) if part in inner), default=len(parts))
    depth = len(parts) - top
    return path_argument(where.parents[depth - 1] if 0 < depth <= len(where.parents) else where), depth


@contextmanager
def system_errors(run: Path, *, required: str, action: str) -> Generator[None, None, None]:
    """Turn what the system refuses in the block into a StorageFailed about a run."""
    try:
        yield
    except StoreError:
        raise
    except OSError as error:
        found = error.strerror or str(error)
        if isinstance(error, shutil.Error) and isinstance(error.args[0], list):  # of every file of a copied folder
            files: list[tuple[str, str, str]] = error.args[0]
            found = f"{len(files)} files could not be copied, the first because of {files[0][2]}"
        if error.filename is not None:
            found = f"{found}: {error.filename}"
        raise StorageFailed(run, found=found, required=required, action=action) from error


def path_argument(run: Path) -> str:
    """Return the path of a run as an argument of commands, quoted for the shell.

    It has a separator: a name alone would stand for another run, one in the runs folder.
    """
    text = str(run)
    return shlex.quote(text if os.sep in text else os.path.join(os.curdir, text))

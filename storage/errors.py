"""Errors about stored runs. Messages give the location, what was found, what was expected and a remedy."""

import os
import shlex
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

_TOP = ("run.json", "writer.lock", "_commits", "_sessions", "_thinned", "_segments", "data.zarr", "tables")


class StoreError(Exception):
    """Base class for errors about stored runs, with the location, the finding, the requirement and a remedy."""

    _verb = "expected"

    def __init__(self, where: object, *, found: str, required: str, action: str) -> None:
        super().__init__(str(where), found, required, action)
        self.where: str = str(where)
        self.found = found
        self.required = required
        self.action = action

    def __str__(self) -> str:
        return f"{self.where}: {self.found}; {self._verb} {self.required}. {self.action}"

    def __reduce__(self) -> tuple[object, ...]:
        # Workers pickle errors; by default, keyword-only arguments would be lost.
        said = {"found": self.found, "required": self.required, "action": self.action}
        return partial(type(self), self.where, **said), ()


class RunNotFound(StoreError, FileNotFoundError):
    """Raised if a run's folder does not exist."""


class NotARun(StoreError):
    """Raised if a folder does not contain a run."""


class InvalidRunName(StoreError, ValueError):
    """Raised for a name or path that a run cannot have."""


class RunExists(StoreError, FileExistsError):
    """Raised if something already exists at the path of a new run."""


class RunLocked(StoreError):
    """Raised if another process is writing the run."""


class FencedOut(StoreError):
    """Raised if a writer tries to write after a later writer has taken over the run."""


class StageMissing(StoreError, LookupError):
    """Raised if a requested output is not stored."""


class StageThinned(StageMissing):
    """Raised if thinning removed a requested output's arrays, which can be recomputed."""


class DigestMismatch(StoreError):
    """Raised if a recomputed output differs from its record."""


class BudgetReached(StoreError):
    """Raised if storing the next output would exceed the run's size limit."""


class StageExists(StoreError):
    """Raised if an output is already stored, since outputs are immutable."""


class LayoutMismatch(StoreError, ValueError):
    """Raised if a batch does not match the layout of the run's arrays, or cannot be stored at all."""


class DamagedRun(StoreError):
    """Raised if a stored file is missing, truncated or changed."""


class IncompatibleFormat(StoreError):
    """Raised if this version cannot read the run's format."""


class StorageFailed(StoreError):
    """Raised if the operating system rejects a read or write, e.g. for lack of space. `__cause__` is the OSError."""

    _verb = "this needs"


def damaged(where: Path, found: str) -> DamagedRun:
    """Return the error for a file that differs from what was written."""
    run, depth = _run_around(where)
    # Everything below the top level, and run.json, can be restored from the rest of the run.
    lost = depth <= 1 and where.name != "run.json"
    return DamagedRun(
        where,
        found=found,
        required="the bytes that were committed",
        action=f"`metaloom verify {run}` lists all damage; "
        + ("restore it from a copy of the run" if lost else f"`metaloom resume {run} --repair` repairs it"),
    )


def fenced_out(where: object, session: int | str) -> FencedOut:
    """Return the error for a writer whose session a later one has ended."""
    return FencedOut(
        where,
        found=f"session {session} of this process, which a later writer ended",
        required="the newest session of the run",
        action="Stop this process; the later writer continues from what was published",
    )


def linked(where: Path) -> DamagedRun:
    """Return the error for a symbolic link in a run, as created by DVC or git-annex."""
    return DamagedRun(
        where,
        found="a symbolic link",
        required="a run of regular files and folders",
        action=f"`cp -rL {_run_around(where)[0]} COPY` copies the files that links of DVC, git-annex or a hub's "
        "cache point to",
    )


def _run_around(where: Path) -> tuple[str, int]:
    """Return the run that contains a path, as a command-line argument, and the path's depth inside the run."""
    parts = where.absolute().parts
    # Take the innermost match, since parent folders may have such names. Segments contain folders of all these names.
    inner = {"_segments"} & {*parts} or _TOP
    top = max((i for i, part in enumerate(parts) if part in inner), default=len(parts))
    depth = len(parts) - top
    return path_argument(where.parents[depth - 1] if 0 < depth <= len(where.parents) else where), depth


@contextmanager
def system_errors(run: Path, *, required: str, action: str) -> Generator[None, None, None]:
    """Within the block, convert OSErrors to StorageFailed errors about a run."""
    try:
        yield
    except StoreError:
        raise
    except OSError as error:
        found = error.strerror or str(error)
        if isinstance(error, shutil.Error) and isinstance(error.args[0], list):  # one entry per file of a copied folder
            files: list[tuple[str, str, str]] = error.args[0]
            found = f"{len(files)} files could not be copied, the first because of {files[0][2]}"
        if error.filename is not None:
            found = f"{found}: {error.filename}"
        raise StorageFailed(run, found=found, required=required, action=action) from error


def path_argument(run: Path) -> str:
    """Return the path of a run as a command-line argument, quoted for the shell.

    It always contains a separator, because a bare name would mean a run in the runs folder.
    """
    text = str(run)
    return shlex.quote(text if os.sep in text else os.path.join(os.curdir, text))

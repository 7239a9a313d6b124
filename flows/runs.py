"""Where runs live and how a user names one: a name under the runs folder, or a path, with `@ITERATION` behind it."""

import os
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import storage


def runs_root() -> Path:
    """The folder of all runs: $METALOOM_RUNS, else `runs` in the working folder."""
    return Path(os.environ.get("METALOOM_RUNS", "runs"))


def run_folder(name_or_path: str) -> Path:
    """The folder that a name or path stands for; it need not exist."""
    return storage.run_path(name_or_path, runs_root())


def report_folder(run: Path) -> Path:
    """Where a run's report goes: beside the run, whose own folder holds only what its records vouch for."""
    return run.parent / "reports" / run.name


def new_run_name(recipe: str) -> str:
    """A name for a new run that says what and when and is not taken."""
    stem = f"{recipe}-{datetime.now():%Y%m%d-%H%M%S}"
    names = [stem, *(f"{stem}-{n}" for n in range(2, 100))]
    return next(name for name in names if not run_folder(name).exists())


@dataclass(frozen=True)
class RunAt:
    """What RUN or RUN@ITERATION stands for."""

    path: Path
    iteration: int | None

    @classmethod
    def parse(cls, text: str) -> "RunAt":
        """Read RUN or RUN@ITERATION.

        Raises:
            ValueError: what follows the "@" is not an iteration.
        """
        name, at, iteration = text.rpartition("@")
        if not at:
            return cls(run_folder(text), None)
        if not iteration.isdecimal():
            raise ValueError(f"{text}: found {iteration!r} after the @; required an iteration such as {name}@12")
        return cls(run_folder(name), int(iteration))

    def require_iteration(self) -> int:
        """The iteration, which the command cannot do without."""
        if self.iteration is None:
            raise ValueError(f"{self.path.name}: required an iteration, as in {self.path.name}@0")
        return self.iteration

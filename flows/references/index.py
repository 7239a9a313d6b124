"""Index of reference runs, which describes them without opening their archives.

A folder of references contains an `index.json`, and an archive NAME.zip for each run in the index.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from rich.table import Table

import metaloom
from metaloom import storage
from metaloom.flows.errors import UsageError
from metaloom.flows.formatting import adaptation_returns, duration, plural, size
from metaloom.flows.views.parts import new_table, optional
from metaloom.pipeline.shown import Row, Shown, suggestion
from metaloom.storage import DamagedRun
from metaloom.storage.format.files import read_sealed, render, replace_file, sealed
from metaloom.storage.format.places import check_run_name

_AGAIN = "Get the folder's archives and index.json again from their source"
INDEX = "index.json"
SCHEMA = "metaloom-references/1"


def broken(place: Path, found: str, *, action: str = _AGAIN) -> storage.DamagedRun:
    """Return the error to raise for a damaged archive or index."""
    return storage.DamagedRun(place, found=found, required="a file from `metaloom reference add`", action=action)


@contextmanager
def as_archive_damage(archive: Path, unpacked: Path) -> Iterator[None]:
    """Within the block, report damage to a temporarily unpacked run as damage to its archive."""
    try:
        yield
    except (storage.DamagedRun, storage.NotARun, storage.StageMissing) as error:
        if str(unpacked) not in error.where:
            raise
        inside = error.where.replace(str(unpacked), "").lstrip("/") or "its run"
        found = error.found.replace(f"{unpacked}/", "")
        action = f"The index names this very archive, so it was added in this state. {_AGAIN}, or ask whoever added it"
        raise broken(archive, f"{inside}: {found}", action=action) from None


@dataclass(frozen=True)
class Reference:
    """Index entry for a reference run."""

    name: str
    env: str
    algorithm: str
    seed: int
    iterations: int
    learners: int  # interval N between stored learners: iterations 0, N, 2N, ... and the newest
    config_digest: str  # digest of the settings that affect results
    code: str  # digest of the code that computed the run
    versions: Mapping[str, str]  # versions of the packages that computed the run
    metrics: Mapping[str, float]  # metrics of the last iteration
    wall_seconds: float  # total wall-clock time of all stages, on the machine that computed the run
    archive: str  # file name of the archive
    size: int  # size of the archive in bytes
    sha256: str  # SHA-256 of the archive


def shipped() -> Path:
    """Return the references folder of a repository checkout; wheels contain no references."""
    return Path(metaloom.__file__).resolve().parent.parent / "references"


def read_index(folder: Path) -> list[Reference]:
    """Return all references in a folder's index. Raise UsageError if there is no index, DamagedRun if it is damaged."""
    try:
        document = read_sealed(folder / INDEX, indented=True)
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(
            f"{folder} contains no references (no {INDEX}); they are in the folder references/ of the repository "
            "and beside its releases. Pass their folder with --from FOLDER"
        ) from None
    except DamagedRun as error:
        raise broken(folder / INDEX, error.found) from None
    try:
        if document["schema"] != SCHEMA:
            raise ValueError(f"schema {document['schema']!r}")
        references = TypeAdapter(list[Reference]).validate_python(document["references"])
        for reference in references:
            check_run_name(reference.name)
            if reference.archive != f"{reference.name}.zip" or reference.learners < 1:
                raise ValueError(f"archive {reference.archive!r}, learners every {reference.learners} iterations")
        if len({reference.name for reference in references}) < len(references):
            raise ValueError("several references with the same name")
        return references
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, ("references", *problem["loc"])))
        raise broken(folder / INDEX, f"not an index of references ({where}: {problem['msg']})") from None
    except (KeyError, ValueError) as error:
        raise broken(folder / INDEX, f"not an index of references ({type(error).__name__}: {error})") from None


def write_index(folder: Path, references: Sequence[Reference]) -> None:
    """Write a folder's index, replacing any existing one."""
    entries = [asdict(reference) for reference in sorted(references, key=lambda reference: reference.name)]
    content = render(sealed({"schema": SCHEMA, "references": entries}), indented=True)
    replace_file(folder / INDEX, content, folder / f"{INDEX}.part")


def find(folder: Path, name: str) -> Reference:
    """Return the reference with this name, or raise UsageError if there is none."""
    known = {reference.name: reference for reference in read_index(folder)}
    if name not in known:
        hint = suggestion(name, known)
        raise UsageError(f"there is no reference {name!r} in {folder}; `metaloom reference ls` lists all{hint}")
    return known[name]


def reference_rows(references: Sequence[Reference]) -> list[dict[str, Any]]:
    """Return one row per reference; `last_return` is the last iteration's average return, after adaptation if any."""
    return [asdict(found) | {"last_return": (adaptation_returns(found.metrics) or [None])[-1]} for found in references]


class References(Shown, list[dict[str, Any]]):
    """Rows that describe references in `folder`; None stands for the checkout's folder."""

    def __init__(self, rows: Sequence[dict[str, Any]], folder: Path | str | None = None) -> None:
        super().__init__(rows)
        self.folder = folder

    def shown(self) -> tuple[str, list[Row]]:
        columns = ("name", "env", "algorithm", "seed", "iterations", "last_return")
        return plural(len(self), "reference"), [columns, *(tuple(str(row[name]) for name in columns) for row in self)]


@dataclass(frozen=True)
class Extracted:
    """Run extracted from a reference."""

    path: Path
    reference: str

    def as_dict(self) -> dict[str, Any]:
        return {"run": str(self.path)}

    def __str__(self) -> str:
        return f"extracted {self.reference} to {self.path}"


@dataclass(frozen=True)
class Added:
    """Reference that was added to a folder."""

    reference: Reference
    folder: Path

    def as_dict(self) -> dict[str, Any]:
        return reference_rows([self.reference])[0]

    def __str__(self) -> str:
        return f"{self.folder / self.reference.archive}: {size(self.reference.size)}"


def references_table(rows: References) -> Table:
    """Return the table printed by `metaloom reference ls`."""
    columns = ("reference", "environment", "algorithm", ">seed", ">iterations", ">last return", ">took", ">size")
    keys = ("name", "env", "algorithm", "seed", "iterations")
    cells = (
        (*(r[name] for name in keys), optional(r["last_return"]), duration(r["wall_seconds"]), size(r["size"]))
        for r in rows
    )
    table = new_table(*columns, rows=cells, drop=("size", "took", "seed", "environment", "algorithm"))
    total = size(sum(row["size"] for row in rows))
    command = f"metaloom reference verify NAME@ITERATION{'' if rows.folder is None else f' --from {rows.folder}'}"
    table.caption = f"{total} in all; `{command}` recomputes any of their iterations"
    return table

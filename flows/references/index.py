"""The index of reference runs: what each is, without opening its archive.

References stand in one folder: `index.json`, and beside it NAME.zip for every run in it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import metaloom
from metaloom.flows.errors import UsageError
from metaloom.flows.references.remedies import broken
from metaloom.pipeline.schema import suggestion
from metaloom.storage import DamagedRun
from metaloom.storage.format.canonical import read_sealed, render, sealed
from metaloom.storage.format.files import replace_file
from metaloom.storage.format.places import check_run_name

INDEX = "index.json"
SCHEMA = "metaloom-references/1"


@dataclass(frozen=True)
class Reference:
    """Index entry of a reference run.

    Attributes:
        name: Run name.
        env, algorithm: Names of environment and algorithm.
        seed: Seed of the run.
        iterations: Number of complete iterations.
        learners: Interval of stored learners: iterations 0, learners, 2 learners, ... and the newest.
        config_digest: Digest of the settings that affect results.
        code: Digest of the code that computed it.
        versions: Versions of the packages that computed it.
        metrics: Metrics of the last iteration.
        wall_seconds: Wall time of its stages, on the machine that computed it.
        archive: File name of the archive.
        size: Size of the archive in bytes.
        sha256: SHA-256 of the archive.
    """

    name: str
    env: str
    algorithm: str
    seed: int
    iterations: int
    learners: int
    config_digest: str
    code: str
    versions: Mapping[str, str]
    metrics: Mapping[str, float]
    wall_seconds: float
    archive: str
    size: int
    sha256: str

    @classmethod
    def parse(cls, entry: Mapping[str, Any]) -> "Reference":
        """Read an entry of the index."""
        reference = cls(**{name: made(entry[name]) for name, made in _FIELDS.items()})
        check_run_name(reference.name)
        if reference.archive != f"{reference.name}.zip" or reference.learners < 1:
            raise ValueError(f"archive {reference.archive!r}, learners of every {reference.learners}")
        return reference


_FIELDS: Mapping[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("name", "env", "algorithm", "config_digest", "code", "archive", "sha256"), str),
    **dict.fromkeys(("seed", "iterations", "learners", "size"), int),
    "versions": lambda found: {str(name): str(version) for name, version in found.items()},
    "metrics": lambda found: {str(name): float(value) for name, value in found.items()},
    "wall_seconds": float,
}
"""Constructor of each field from its entry."""


def shipped() -> Path:
    """Return the folder of the references of a checkout; a wheel has none."""
    return Path(metaloom.__file__).resolve().parent.parent / "references"


def read_index(folder: Path) -> list[Reference]:
    """Return all references of a folder, in order of their names."""
    try:
        document = read_sealed(folder / INDEX, indented=True)
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(
            f"{folder}: found no references here (no {INDEX}); they are in the folder references/ of the repository "
            "and beside its releases. Name the folder that you have them in: --from FOLDER"
        ) from None
    except DamagedRun as error:
        raise broken(folder / INDEX, error.found) from None
    try:
        if document["schema"] != SCHEMA:
            raise ValueError(f"schema {document['schema']!r}")
        references = [Reference.parse(entry) for entry in document["references"]]
        if len({reference.name for reference in references}) < len(references):
            raise ValueError("several references of the same name")
        return references
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise broken(folder / INDEX, f"is no index of references ({type(error).__name__}: {error})") from None


def write_index(folder: Path, references: Sequence[Reference]) -> None:
    """Rewrite the index of a folder."""
    entries = [asdict(reference) for reference in sorted(references, key=lambda reference: reference.name)]
    content = render(sealed({"schema": SCHEMA, "references": entries}), indented=True)
    replace_file(folder / INDEX, content, folder / f"{INDEX}.part")


def find(folder: Path, name: str) -> Reference:
    """Return the reference of a name."""
    known = {reference.name: reference for reference in read_index(folder)}
    if name not in known:
        raise UsageError(
            f"found no reference {name!r} in {folder}; `metaloom reference ls` lists all{suggestion(name, [*known])}"
        )
    return known[name]

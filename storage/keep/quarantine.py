"""Data of failed stages, stored with the run for debugging.

A folder `_quarantine/{iteration:08d}.{stage}.{step}` contains `about.json` and one `.npy` file per array. It is not
covered by the run's records, so `verify` ignores it, and it may be deleted at any time.
"""

import io
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from metaloom.pipeline.dataflow.refs import StageRef
from metaloom.pipeline.outputs import DTYPES
from metaloom.pipeline.shown import plain_data
from metaloom.pipeline.types import Array
from metaloom.storage.errors import DamagedRun, StoreError, system_errors
from metaloom.storage.format.files import read_file, read_sealed, render, sealed
from metaloom.storage.format.provenance import utc
from metaloom.storage.format.records import SCHEMA
from metaloom.storage.unfinished import unfinished_folder

FOLDER = "_quarantine"
_ABOUT = "about.json"


@dataclass(frozen=True)
class Form:
    """Dtype name and shape of an array."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Quarantined:
    """Fault in a stage: its location and the data needed to reproduce it."""

    ref: StageRef
    path: Path
    message: str
    about: Mapping[str, Any]  # location and circumstances as plain data: array, task, episode, t, seed_position, ...
    when: str  # UTC, ISO 8601; "" if the folder `path` cannot be read
    forms: Mapping[str, Form]  # dtypes and shapes of the arrays, in file order

    def arrays(self) -> dict[str, Array]:
        """Read the arrays, keyed by name. Raises DamagedRun if a file is missing or is not a numeric array."""
        files = enumerate(self.forms.items())
        return {name: _read_array(self.path / _file_name(n), form) for n, (name, form) in files}


def put_in_quarantine(
    run: Path, ref: StageRef, *, message: str, about: Mapping[str, Any], arrays: Mapping[str, Array]
) -> Path:
    """Store the data of a failed stage, replacing the data of an earlier failure of the same stage; return its folder.

    Raises StorageFailed if the system rejects the write, and DamagedRun if the quarantine is a symbolic link.
    """
    root = run / FOLDER
    folder = root / ref.file_name.removesuffix(".json")
    required = "free space and permission to write the run"
    with system_errors(run, required=required, action="Free space or repair the disk"):
        if root.is_symlink():
            raise _foreign(root, "a symbolic link")
        root.mkdir(exist_ok=True)
        with unfinished_folder(root, folder.name) as part:
            for n, array in enumerate(arrays.values()):
                with (part / _file_name(n)).open("wb") as file:
                    np.lib.format.write_array(file, np.asarray(array, order="C"), version=(1, 0), allow_pickle=False)
            forms = [{"name": name, "dtype": str(a.dtype), "shape": list(a.shape)} for name, a in arrays.items()]
            fault = {"message": message, "about": plain_data(about, str), "arrays": forms, "when": utc()}
            document = {"schema": SCHEMA, **ref.document(), **fault}
            (part / _ABOUT).write_bytes(render(sealed(document), indented=True))
            if folder.exists():
                shutil.rmtree(folder)
            part.rename(folder)
    return folder


def read_quarantine(run: Path) -> list[Quarantined]:
    """Return the faults of failed stages, in order. The message of an unreadable fault says so."""
    root = run / FOLDER
    names = [entry.name for entry in root.iterdir()] if root.is_dir() and not root.is_symlink() else []
    refs = (StageRef.from_file_name(f"{name}.json") for name in names)
    found = sorted((ref for ref in refs if ref is not None), key=lambda ref: (ref.iteration, ref.step, ref.stage))
    return [_read(root, ref) for ref in found]


def _read(root: Path, ref: StageRef) -> Quarantined:
    path = root / ref.file_name.removesuffix(".json")
    try:
        document = read_sealed(path / _ABOUT, indented=True)
        forms: dict[str, Form] = {}
        for entry in document["arrays"]:
            if entry["dtype"] not in DTYPES or min(entry["shape"], default=0) < 0:
                raise ValueError(f"unexpected dtype {entry['dtype']} or shape {entry['shape']}")
            forms[str(entry["name"])] = Form(entry["dtype"], tuple(int(size) for size in entry["shape"]))
        about: Mapping[str, Any] = document["about"]
        return Quarantined(ref, path, str(document["message"]), about, str(document["when"]), forms)
    except (StoreError, OSError, KeyError, TypeError, ValueError) as error:
        found = error.found if isinstance(error, StoreError) else f"{type(error).__name__}: {error}"
        return Quarantined(ref, path, f"cannot be read: {found}", {}, "", {})


def _read_array(path: Path, form: Form) -> Array:
    # Not np.load, which allocates memory for the claimed shape before checking the size of the file.
    dtype, header = np.dtype(form.dtype), io.BytesIO()
    described = {"descr": dtype.str, "fortran_order": False, "shape": form.shape}
    np.lib.format.write_array_header_1_0(header, described)
    start, size = header.tell(), dtype.itemsize * math.prod(form.shape)
    try:
        raw = read_file(path, limit=start + size)
    except FileNotFoundError:
        raise _foreign(path, "missing") from None
    if len(raw) != start + size or raw[:start] != header.getvalue():
        raise _foreign(path, f"not a {form.dtype} array of shape {list(form.shape)}")
    return np.frombuffer(raw, dtype, offset=start).reshape(form.shape)


def _foreign(path: Path, found: str) -> DamagedRun:
    return DamagedRun(
        path,
        found=found,
        required="data written by a failed stage",
        action="The quarantine is not part of the run's data; its folder may be deleted",
    )


def _file_name(n: int) -> str:
    return f"{n:03d}.npy"

"""Segments in the folder that caches a run: they come and go as wholes, as whoever reads the folder expects."""

import os
import re
import secrets
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from metaloom.storage.format.segments import FOLDER, SEAL, segment_iterations

_SEGMENT = re.compile(rf"({FOLDER}/\d{{8}}-\d{{8}})(/.*)?", re.ASCII)


def segment_of(name: str) -> str | None:
    """The folder of the segment that a file of a run is in, as a path in the run; None for any other file."""
    match = _SEGMENT.fullmatch(name)
    return match[1] if match else None


def sealed_in(names: Iterable[str]) -> set[str]:
    """The folders of the segments whose seals are among some files."""
    found = {name: segment_of(name) for name in names if name.endswith(f"/{SEAL}")}
    return {folder for name, folder in found.items() if folder is not None and name == f"{folder}/{SEAL}"}


def surplus_segments(root: Path, files: Iterable[str]) -> list[Path]:
    """The folders of segments that a run's folder has, and a log with these files does not seal."""
    try:
        names = [name for name in os.listdir(root / FOLDER) if segment_iterations(name) is not None]
    except (FileNotFoundError, NotADirectoryError):
        return []
    sealed = sealed_in(files)
    return [root / FOLDER / name for name in sorted(names) if f"{FOLDER}/{name}" not in sealed]


def place_segment(root: Path, beside: Path, folder: str, texts: Mapping[str, str]) -> None:
    """Make a segment appear, with its small files; what it held so far is fetched again."""
    part = beside / f"{secrets.token_hex(8)}.part"
    for name, text in texts.items():
        path = part / name.removeprefix(f"{folder}/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8", newline="")
    drop_segment(root / folder, beside)
    (root / folder).parent.mkdir(parents=True, exist_ok=True)
    os.rename(part, root / folder)


def drop_segment(folder: Path, beside: Path) -> None:
    """Take the folder of a segment away, if it is there."""
    part = beside / f"{secrets.token_hex(8)}.part"
    try:
        os.rename(folder, part)
    except FileNotFoundError:
        return
    shutil.rmtree(part)

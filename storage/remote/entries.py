"""Entries of a run's log: sealed JSON, numbered without gaps, each with the hash of the previous one."""

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from metaloom.storage.format.files import parse_sealed, render, sealed

SCHEMAS = ("metaloom-log/1", "metaloom-log/2")
"""Schemas of the log. The second adds segments, and is rejected by earlier versions."""

AT_ONCE = 128
_BYTES_AT_ONCE = 2**26

Kind = Literal["begin", "commit", "end"]

_ARRAYS = r"data\.zarr(/\w[\w.\-]*){0,2}/zarr\.json|data\.zarr/\w+/\w[\w.\-]*/c[0-9.]*"
_SINGLE = (
    r"run\.json|_commits/[A-Za-z0-9_.]+\.json|_thinned/\d{8}\.json|_sessions/\d{6,9}-[0-9a-f]{16}\.closed/(session|run)\.json"
    rf"|{_ARRAYS}|tables/\w+/\d{{8}}\.parquet"
)
_PACKED = (
    r"_thinned/\d{8}-\d{8}\.json"
    rf"|_segments/\d{{8}}-\d{{8}}/(seal\.json|records\.parquet|tables/\w+\.parquet|{_ARRAYS})"
)
_PATHS = (re.compile(_SINGLE, re.ASCII), re.compile(f"{_SINGLE}|{_PACKED}", re.ASCII))
_TOKEN = re.compile("[0-9a-f]{16}")
_KEY = re.compile(r"_objects/[0-9a-f]{16}/\d{8,}/(.*)", re.ASCII)


@dataclass(frozen=True)
class LoggedFile:
    """File of the run as described by a log entry, which contains the text of small documents."""

    size: int
    text: str | None = None
    key: str = ""  # key of the object that holds the content of a file without text; moved files keep it
    sha256: str = ""


@dataclass(frozen=True)
class Entry:
    """Log entry: a writing session begins, commits files atomically, or ends."""

    sequence: int
    previous: str  # hash of the previous entry, "" for the first
    kind: Kind
    session: str
    about: Mapping[str, Any] = field(default_factory=dict[str, Any])  # a begun session: host, pid, since
    files: Mapping[str, LoggedFile] = field(default_factory=dict[str, LoggedFile])  # new content
    removed: Sequence[str] = ()  # paths of removed files
    sha256: str = ""

    def content(self) -> bytes:
        files: dict[str, dict[str, Any]] = {}
        for path, file in self.files.items():
            moved = {"key": file.key} if self.is_moved(path) else {}
            content = {"size": file.size, "sha256": file.sha256, **moved}
            files[path] = content if file.text is None else {"text": file.text}
        paths = (*files, *self.removed)
        is_later = not all(map(_PATHS[0].fullmatch, paths)) or any("key" in about for about in files.values())
        document = {
            "schema": SCHEMAS[is_later],
            "sequence": self.sequence,
            "previous": self.previous,
            "kind": self.kind,
            "session": self.session,
            "about": dict(self.about),
            "files": files,
            "removed": list(self.removed),
        }
        return render(sealed(document))

    def is_moved(self, path: str) -> bool:
        """Return True if another entry stored the file's object."""
        return self.files[path].text is None and self.files[path].key != object_key(self.session, self.sequence, path)

    @classmethod
    def parse(cls, raw: bytes) -> "Entry":
        """Parse a serialized entry. Raises ValueError if it is invalid."""
        document = parse_sealed(raw)
        try:
            if document["schema"] not in SCHEMAS or document["kind"] not in ("begin", "commit", "end"):
                raise ValueError(f"has an unexpected schema {document['schema']!r} or kind {document['kind']!r}")
            sequence, session = int(document["sequence"]), str(document["session"])
            paths, known = [*document["files"], *document["removed"]], _PATHS[SCHEMAS.index(document["schema"])]
            if wrong := [path for path in paths if not known.fullmatch(path)] or not _TOKEN.fullmatch(session):
                raise ValueError(f"names {wrong}, which is not part of a run")
            held = document["files"].items()
            files = {path: _parse_file(file, object_key(session, sequence, path)) for path, file in held}
            previous, about, removed = str(document["previous"]), dict(document["about"]), tuple(document["removed"])
            return cls(sequence, previous, document["kind"], session, about, files, removed, document["sha256"])
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a log entry ({type(error).__name__}: {error})") from None


def object_key(session: str, sequence: int, path: str) -> str:
    """Return the key of a file's object, below the session's prefix so that no other session replaces it."""
    return f"_objects/{session}/{sequence:08d}/{path}"


def in_groups(files: Iterable[tuple[str, LoggedFile]]) -> Iterator[list[tuple[str, LoggedFile]]]:
    """Yield files in groups that fit into memory and are downloaded together."""
    group: list[tuple[str, LoggedFile]] = []
    for item in files:
        group.append(item)
        if len(group) == AT_ONCE or sum(file.size for _, file in group) > _BYTES_AT_ONCE:
            yield group
            group = []
    if group:
        yield group


def entry_key(sequence: int) -> str:
    return f"_log/{sequence:08d}.json"


def _parse_file(about: Mapping[str, Any], key: str) -> LoggedFile:
    if "text" in about:
        return LoggedFile(len(about["text"].encode()), about["text"])
    # A moved file keeps its object, which the entry then names.
    if "key" in about and not ((named := _KEY.fullmatch(about["key"])) and _PATHS[1].fullmatch(named[1])):
        raise ValueError(f"names the object {about['key']!r}, which is not part of a run")
    return LoggedFile(int(about["size"]), None, about.get("key", key), str(about["sha256"]))


def problem_of(file: LoggedFile, raw: bytes) -> str | None:
    """Return a description of how content differs from a logged file, or None if it does not."""
    if len(raw) != file.size:
        return f"holds {len(raw)} bytes, but {file.size} were committed"
    return None if hashlib.sha256(raw).hexdigest() == file.sha256 else "its SHA-256 differs from the committed one"

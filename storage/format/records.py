"""Commit records. A stage's output is stored once its record has been published atomically."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from sys import intern
from typing import Any

from metaloom.pipeline.dataflow.refs import Span, StageRef
from metaloom.storage.errors import damaged
from metaloom.storage.format.files import parse_sealed, read_sealed, render, sealed

SCHEMA = "metaloom/1"  # schema of records, markers and sessions, which is the same in all run formats

FORMAT = "metaloom/2"  # format of new runs

FORMATS = ("metaloom/1", FORMAT, "metaloom/3")
"""Run formats, as named in run.json. The second added shards and segments, the third forks with other metrics."""

MOST_SESSIONS = 10**9
_TOKEN = re.compile(r"[0-9a-f]{16}")


def has_shards(info: Mapping[str, Any]) -> bool:
    """Return True if a run's large arrays are sharded, according to the format in run.json. Runs keep their format."""
    return info["format"] != FORMATS[0]


@dataclass(frozen=True, slots=True)
class Input:
    """Input of a stored output: another stage's output."""

    ref: StageRef
    digest: str


@dataclass(frozen=True)
class SpanInput:
    """Input of a stored output that covers all outputs of some stages up to an iteration.

    Outputs are ordered by iteration, then step, then index in `stages`. `steps` is the number of real environment steps
    in the outputs, 0 without episodes. `digest` is the SHA-256 of a line per output, "ITERATION STAGE STEP DIGEST".
    """

    stages: tuple[str, ...]
    first: StageRef
    last: StageRef
    outputs: int
    steps: int
    digest: str

    @property
    def span(self) -> Span:
        return Span(self.stages, self.first.iteration, self.last.iteration)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"stages": list(self.stages)}


@dataclass(frozen=True, slots=True)
class StoredFile:
    """File that a record commits."""

    path: str  # relative to the run's folder
    size: int  # 0 for the chunk of an array without entries, which has no file
    crc32c: int  # CRC-32C of a table's bytes, or of a chunk's bytes without its trailing checksum
    array: str = ""  # "" for a table


@dataclass(frozen=True, slots=True)
class ArrayDigest:
    """Dtype and shape of an array, and the SHA-256 of both and the array's bytes."""

    sha256: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class StageRecord:
    """Record of a stage's output: its inputs, time, author and checksums."""

    ref: StageRef
    sequence: int  # index in the run's history, from 0; it alone defines the order
    session: int  # number of the writing session; `token` identifies it permanently
    token: str
    inputs: tuple[Input, ...]  # outputs that it was computed from; `spans` contains the others
    seed_position: tuple[int, ...]  # iteration, inner step, ... from which its random streams are derived
    config_digest: str  # digest of the settings that affect results
    chunks: tuple[StoredFile, ...]  # chunks with the output's arrays
    tables: tuple[StoredFile, ...]  # derived tables that are committed with the output
    arrays: Mapping[str, ArrayDigest]  # digest of each array, keyed by its name in the value
    digest: str  # digest of `arrays`; equal digests mean equal outputs
    versions: Mapping[str, str]  # versions of Python and the libraries that computed it
    started: str  # UTC, ISO 8601
    seconds: float  # wall time of the computation
    previous: str  # hash of the previous record, or of run.json for the first
    sha256: str = ""  # hash of this record
    spans: tuple[SpanInput, ...] = ()  # inputs that cover several outputs each

    @property
    def stored_bytes(self) -> int:
        """Size of the output's files in bytes when it was committed, including tables."""
        return sum(file.size for file in (*self.chunks, *self.tables))

    def with_hash(self) -> "StageRecord":
        return replace(self, sha256=self._document()["sha256"])

    def content(self) -> bytes:
        return render(self._document())

    def _document(self) -> dict[str, Any]:
        return sealed(
            {
                "schema": SCHEMA,
                **self.ref.document(),
                "sequence": self.sequence,
                "session": self.session,
                "token": self.token,
                "inputs": [{**item.ref.document(), "digest": item.digest} for item in self.inputs],
                "seed_position": list(self.seed_position),
                "config_digest": self.config_digest,
                "chunks": [asdict(file) for file in self.chunks],
                "tables": [{"path": file.path, "size": file.size, "crc32c": file.crc32c} for file in self.tables],
                "arrays": {name: asdict(digest) for name, digest in self.arrays.items()},
                "digest": self.digest,
                "versions": dict(self.versions),
                "started": self.started,
                "seconds": self.seconds,
                "previous": self.previous,
                # Omitted if empty, so that records without spans are the same as in earlier versions.
                **({"spans": [item.as_dict() for item in self.spans]} if self.spans else {}),
            }
        )


def read_record(path: Path) -> StageRecord:
    """Read a record from its file in `_commits`. Raises DamagedRun if it is damaged or belongs to another output."""
    record = _parsed(read_sealed(path), path)
    if record.ref.file_name != path.name:
        raise damaged(path, f"contains the record of {record.ref}")
    return record


def parse_record(raw: bytes, where: Path) -> StageRecord:
    """Parse a serialized record. Raises DamagedRun, naming the file `where`, if it is invalid."""
    try:
        document = parse_sealed(raw)
    except ValueError as error:
        raise damaged(where, str(error)) from None
    return _parsed(document, where)


def _parsed(document: Mapping[str, Any], where: Path) -> StageRecord:
    try:
        if document["schema"] != SCHEMA:
            raise ValueError(f"unexpected schema {document['schema']!r}")
        session, token = parse_session(document["session"], document["token"])
        return StageRecord(
            ref=StageRef.parse(document),
            sequence=int(document["sequence"]),
            session=session,
            token=token,
            inputs=tuple(Input(StageRef.parse(item), str(item["digest"])) for item in document["inputs"]),
            seed_position=tuple(int(number) for number in document["seed_position"]),
            config_digest=str(document["config_digest"]),
            chunks=_parse_files(document["chunks"]),
            tables=_parse_files(document["tables"]),
            arrays={
                intern(str(name)): ArrayDigest(str(a["sha256"]), intern(str(a["dtype"])), (*map(int, a["shape"]),))
                for name, a in document["arrays"].items()
            },
            digest=str(document["digest"]),
            versions={intern(str(name)): intern(str(version)) for name, version in document["versions"].items()},
            started=str(document["started"]),
            seconds=float(document["seconds"]),
            previous=str(document["previous"]),
            sha256=str(document["sha256"]),
            spans=tuple(_parse_span(item) for item in document.get("spans", [])),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise damaged(where, f"not a commit record ({type(error).__name__}: {error})") from None


def parse_session(number: Any, token: Any) -> tuple[int, str]:
    """Return a session's number and token, which form its folder's name. Raises ValueError if either is invalid."""
    if not 0 <= int(number) < MOST_SESSIONS or not _TOKEN.fullmatch(str(token)):
        raise ValueError(f"invalid session number {number} or token {token!r}")
    return int(number), str(token)


def _parse_span(document: Mapping[str, Any]) -> SpanInput:
    item = SpanInput(
        stages=tuple(str(stage) for stage in document["stages"]),
        first=StageRef.parse(document["first"]),
        last=StageRef.parse(document["last"]),
        outputs=int(document["outputs"]),
        steps=int(document["steps"]),
        digest=str(document["digest"]),
    )
    if item.first not in item.span or item.last not in item.span:
        raise ValueError(f"the span {item.span} begins with {item.first} and ends with {item.last}")
    return item


def _parse_files(documents: Sequence[Mapping[str, Any]]) -> tuple[StoredFile, ...]:
    return tuple(
        StoredFile(str(d["path"]), int(d["size"]), int(d["crc32c"]), intern(str(d.get("array", "")))) for d in documents
    )

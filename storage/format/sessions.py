"""Files that writing sessions leave in a run's folder: the writer, lost records, and the end of the history."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from metaloom.pipeline.dataflow.refs import StageRef
from metaloom.storage.errors import DamagedRun, damaged
from metaloom.storage.format.canonical import Document, read_sealed
from metaloom.storage.format.records import StageRecord

FOLDER = "_sessions"
ABOUT = "session.json"
INFO_COPY = "run.json"
"""Name of the copy of run.json that the session keeps which wrote it."""
CLOSED = ".closed"

PART_NAME = re.compile(r"[0-9]{8,}\.part")
_NUMBER = "([0-9]{6}|[1-9][0-9]{6,})"
_LARGEST_LEAP = 1000
"""Largest gap between two session numbers. A power cut can remove the claims of sessions between them."""
CLAIM_NAME = re.compile(rf"{_NUMBER}\.claim")
_SESSION_NAME = re.compile(rf"{_NUMBER}-([0-9a-f]{{16}})(\.closed)?")


class SessionName(NamedTuple):
    """Parts of the name of a session's folder.

    Attributes:
        number, token: Number and token of the session.
        closed: True if it has ended.
    """

    number: int
    token: str
    closed: bool = False

    @classmethod
    def parse(cls, name: str) -> "SessionName | None":
        """Parse the name of a session's folder; None for any other name."""
        match = _SESSION_NAME.fullmatch(name)
        return cls(int(match[1]), match[2], match[3] is not None) if match else None

    def __str__(self) -> str:
        return f"{self.number:06d}-{self.token}{CLOSED if self.closed else ''}"


def session_number(name: str) -> int:
    """Return the session number of a name in the folder of sessions, -1 for any other name."""
    if (session := SessionName.parse(name)) is not None:
        return session.number
    claim = CLAIM_NAME.fullmatch(name)
    return int(claim[1]) if claim else -1


def stray_sessions(folder: Path, names: Iterable[str]) -> Iterator[tuple[str, int]]:
    """Find claims and undescribed session folders whose number does not continue the sequence.

    Args:
        folder: Folder of sessions.
        names: Names in the folder.

    Yields:
        Each name, and the largest number below its own; -1 where there is none.
    """
    previous = -1
    for number, name in sorted((session_number(name), name) for name in names):
        if number - previous > _LARGEST_LEAP and not (folder / name / ABOUT).exists():
            yield name, previous
        previous = max(previous, number)


@dataclass(frozen=True)
class Head:
    """The newest record that a session knew of.

    Attributes:
        sequence: Index in the history.
        sha256: Hash of the record.
        ref: Output that it commits.
        digest: Digest of the output.
    """

    sequence: int
    sha256: str
    ref: StageRef
    digest: str

    @classmethod
    def of(cls, record: StageRecord) -> "Head":
        """Return the head of a history that ends with a record."""
        return cls(record.sequence, record.sha256, record.ref, record.digest)

    def document(self) -> Document:
        """Return the head as plain data."""
        return {"sequence": self.sequence, "sha256": self.sha256, "digest": self.digest, **self.ref.document()}

    @classmethod
    def parse(cls, document: Mapping[str, Any]) -> "Head":
        """Return the head that a session wrote down."""
        sequence, ref = int(document["sequence"]), StageRef.parse(document)
        return cls(sequence, str(document["sha256"]), ref, str(document["digest"]))


@dataclass(frozen=True)
class SessionFacts:
    """State of the run's history as a session recorded it.

    Attributes:
        number, token: Number and token of the session.
        lost: Positions of records that were missing when it began.
        next_sequence: Position of the first record that it could write.
        head: Newest record when it ended; when it began, if it did not end by itself. None before the first one,
            and in sessions of earlier versions.
        sealed: True if it ended by itself, so `head` is the newest record of all.
    """

    number: int
    token: str
    lost: frozenset[int]
    next_sequence: int
    head: Head | None
    sealed: bool

    @property
    def known(self) -> int:
        """Positions below this one hold a record, unless it was lost."""
        return max(self.next_sequence, self.head.sequence + 1 if self.head else 0)


def read_session(folder: Path) -> Document:
    """Read what a session wrote down about itself.

    Raises:
        FileNotFoundError: it was interrupted before it could.
        DamagedRun: the file is not what was written.
    """
    try:
        return read_sealed(folder / ABOUT)
    except FileNotFoundError:  # it may have been closed since its folder was seen
        return read_sealed(folder.with_name(folder.name.removesuffix(CLOSED) + CLOSED) / ABOUT)


def session_facts(folder: Path) -> SessionFacts:
    """Read a session's facts about the history from its folder; raises as `read_session`."""
    document = read_session(folder)
    session = SessionName.parse(folder.name)
    assert session is not None, f"{folder} is not named like the folder of a session"
    try:
        head = document.get("head")
        return SessionFacts(
            session.number,
            session.token,
            frozenset(int(sequence) for sequence in document["lost"]),
            int(document["next_sequence"]),
            None if head is None else Head.parse(head),
            bool(document.get("sealed", False)),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise damaged(folder / ABOUT, f"does not describe a session ({type(error).__name__}: {error})") from None


def newest_session(root: Path, first: int) -> SessionFacts | None:
    """Read the facts of the newest readable session whose number is at least `first`, or return None.

    Call it before listing records: the list then includes every record that the session knew.
    """
    try:
        names = os.listdir(root / FOLDER)
    except (FileNotFoundError, NotADirectoryError):
        return None
    for session in sorted((session for session in map(SessionName.parse, names) if session), reverse=True):
        if session.number < first:
            return None
        try:
            return session_facts(root / FOLDER / str(session))
        except (FileNotFoundError, DamagedRun):  # killed before it wrote anything, or reported by `verify`
            continue
    return None

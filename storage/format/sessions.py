"""Files in which writing sessions record their environment, lost records, and the end of the history."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from metaloom.pipeline.dataflow.refs import StageRef
from metaloom.storage.errors import DamagedRun, damaged
from metaloom.storage.format.files import Document, folder_entries, read_sealed
from metaloom.storage.format.records import StageRecord

FOLDER = "_sessions"
ABOUT = "session.json"
INFO_COPY = "run.json"  # name of the copy of run.json in the folder of the session that wrote it
CLOSED = ".closed"

PART_NAME = re.compile(r"[0-9]{8,}\.part")
_NUMBER = "([0-9]{6}|[1-9][0-9]{6,})"
_LARGEST_LEAP = 1000  # largest gap between two session numbers. A power failure can remove the claims in between.
CLAIM_NAME = re.compile(rf"{_NUMBER}\.claim")
_SESSION_NAME = re.compile(rf"{_NUMBER}-([0-9a-f]{{16}})(\.closed)?")


class SessionName(NamedTuple):
    """Name of a session's folder: the session's number, its token, and whether the session has ended."""

    number: int
    token: str
    closed: bool = False

    @classmethod
    def parse(cls, name: str) -> "SessionName | None":
        match = _SESSION_NAME.fullmatch(name)
        return cls(int(match[1]), match[2], match[3] is not None) if match else None

    def __str__(self) -> str:
        return f"{self.number:06d}-{self.token}{CLOSED if self.closed else ''}"


def session_number(name: str) -> int:
    """Return the session number in the name of a session's folder or claim; -1 for other names."""
    if (session := SessionName.parse(name)) is not None:
        return session.number
    claim = CLAIM_NAME.fullmatch(name)
    return int(claim[1]) if claim else -1


def stray_sessions(folder: Path, names: Iterable[str]) -> Iterator[tuple[str, int]]:
    """Yield the name of each claim or undescribed session folder that is numbered over 1,000 above the previous one.

    The second item is the previous number, or -1 if there is none.
    """
    previous = -1
    for number, name in sorted((session_number(name), name) for name in names):
        if number - previous > _LARGEST_LEAP and not (folder / name / ABOUT).exists():
            yield name, previous
        previous = number


@dataclass(frozen=True)
class Head:
    """Newest record known to a session: its index in the history, its hash, its output, and the output's digest."""

    sequence: int
    sha256: str
    ref: StageRef
    digest: str

    @classmethod
    def of(cls, record: StageRecord) -> "Head":
        return cls(record.sequence, record.sha256, record.ref, record.digest)

    def document(self) -> Document:
        return {"sequence": self.sequence, "sha256": self.sha256, "digest": self.digest, **self.ref.document()}

    @classmethod
    def parse(cls, document: Mapping[str, Any]) -> "Head":
        sequence, ref = int(document["sequence"]), StageRef.parse(document)
        return cls(sequence, str(document["sha256"]), ref, str(document["digest"]))


@dataclass(frozen=True)
class SessionFacts:
    """State of the run's history as recorded by a session."""

    number: int
    token: str
    lost: frozenset[int]  # positions of records that were missing when it started
    next_sequence: int
    head: Head | None  # newest record when it ended, or when it started if it was interrupted; None if unknown
    sealed: bool

    @property
    def known(self) -> int:
        """Position below which every record exists, unless it was lost."""
        return max(self.next_sequence, self.head.sequence + 1 if self.head else 0)


def read_session(folder: Path) -> Document:
    """Read a session's description. Raises FileNotFoundError if it was never written, and DamagedRun."""
    try:
        return read_sealed(folder / ABOUT)
    except FileNotFoundError:  # it may have been closed in the meantime
        return read_sealed(folder.with_name(folder.name.removesuffix(CLOSED) + CLOSED) / ABOUT)


def session_facts(folder: Path) -> SessionFacts:
    """Read what a session recorded about the history, given its folder. Raises the same errors as `read_session`."""
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


def sessions_in(root: Path) -> list[SessionName]:
    """Return the parsed names of a run's session folders, in order."""
    entries = folder_entries(root / FOLDER) or []
    return sorted(name for entry in entries if (name := SessionName.parse(entry.name)))


def newest_session(root: Path, first: int) -> SessionFacts | None:
    """Return the facts recorded by the newest readable session with number `first` or higher, or None.

    Call this before listing records, so that the list includes every record known to the session.
    """
    for session in reversed(sessions_in(root)):
        if session.number < first:
            return None
        try:
            return session_facts(root / FOLDER / str(session))
        except (FileNotFoundError, DamagedRun):  # killed before writing anything, or reported by `verify`
            continue
    return None

"""The chain of commit records: every record names the hash of the one before it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from metaloom.storage.errors import DamagedRun, damaged
from metaloom.storage.format.records import StageRecord
from metaloom.storage.format.refs import StageRef
from metaloom.storage.format.sessions import Head, SessionFacts, newest_session
from metaloom.storage.read.ancestry import boundaries, first_sequence, first_session
from metaloom.storage.read.committed import CommittedFiles


@dataclass
class History:
    """Knowledge of the records so far that a writer needs.

    Attributes:
        digests: digest of every stored output.
        next_sequence: position of the next record.
        last_hash: hash of the newest record; of run.json when there is none.
        head: the newest record.
        lost: positions of records that are gone; whoever resumes computes their outputs again.
        newly_lost: those of them that the newest session did not know to be gone.
        leftovers: files of thinned outputs that an interruption left.
    """

    digests: dict[StageRef, str]
    next_sequence: int
    last_hash: str
    head: Head | None
    lost: list[int] = field(default_factory=list[int])
    newly_lost: list[int] = field(default_factory=list[int])
    leftovers: list[Path] = field(default_factory=list[Path])

    def append(self, record: StageRecord) -> None:
        """Take a published record into account."""
        self.digests[record.ref] = record.digest
        self.next_sequence = record.sequence + 1
        self.last_hash = record.sha256
        self.head = Head.of(record)


def read_history(files: CommittedFiles, info: Mapping[str, Any]) -> History:
    """The history of a run, after checking that its chain and its files are whole.

    Args:
        files: of the run.
        info: content of its run.json.

    Raises:
        DamagedRun: a record is damaged, or a file that one commits is missing or cut short.
    """
    known = newest_session(files.root, first_session(info))
    thinned = _thinned_outputs(files)
    records = _sound_records(files, thinned)
    follows = boundaries(info)
    for problem in (*chain_problems(files, records, follows), *head_problems(files, records, known)):
        raise problem
    last = records[-1] if records else None
    next_sequence = max(last.sequence + 1 if last else 0, first_sequence(info), known.known if known else 0)
    lost = missing_positions(records, next_sequence)
    return History(
        digests={record.ref: record.digest for record in records},
        next_sequence=next_sequence,
        last_hash=follows.get(next_sequence) or (last.sha256 if last else info["sha256"]),
        head=Head.of(last) if last else None,
        lost=lost,
        newly_lost=[sequence for sequence in lost if known is not None and sequence not in known.lost],
        leftovers=[
            path
            for record in records
            if thinned.get(record.ref) == record.sha256
            for chunk in record.chunks
            if chunk.size and (path := files.root / chunk.path).exists()
        ],
    )


def missing_positions(records: Iterable[StageRecord], end: int) -> list[int]:
    """The positions below `end` that none of some records has."""
    present = {record.sequence for record in records}
    return [sequence for sequence in range(end) if sequence not in present]


def describe_missing(positions: Sequence[int], known: SessionFacts | None) -> str:
    """Words for records that are gone, with what is known of the newest one."""
    found = f"the records at positions {[*positions]} of the history are missing"
    if known is None or known.head is None or known.head.sequence not in positions:
        return found
    return f"{found}; the newest that session {known.number} knew of was that of {known.head.ref}"


def head_problems(
    files: CommittedFiles, records: Iterable[StageRecord], known: SessionFacts | None
) -> Iterable[DamagedRun]:
    """The record that stands where the newest session knew another one to be the newest."""
    if known is not None and (head := known.head) is not None:
        for record in records:
            if record.sequence == head.sequence and record.sha256 != head.sha256:
                where = files.record_path(record.ref)
                yield _broken_chain(where, f"is not the record that session {known.number} knew at its position")


def chain_problems(
    files: CommittedFiles, records: Iterable[StageRecord], follows: Mapping[int, str]
) -> Iterable[DamagedRun]:
    """The places where records, in the order of their sequence, do not follow one another.

    Gaps are no such place: they are a matter of what is stored, not of what a record says.

    Args:
        files: of the run.
        records: to look at.
        follows: by position, the hash that a record there follows instead of that of the record before it.
    """
    sequence, sha256 = -1, None
    for record in records:
        where = files.record_path(record.ref)
        before = follows.get(record.sequence) or (sha256 if record.sequence == sequence + 1 else None)
        if record.sequence == sequence:
            yield _broken_chain(where, f"has the position {sequence} in the history that another record has")
        elif before is not None and record.previous != before:
            yield _broken_chain(where, "does not follow the record before it")
        sequence, sha256 = record.sequence, record.sha256


def _thinned_outputs(files: CommittedFiles) -> dict[StageRef, str]:
    outputs: dict[StageRef, str] = {}
    for iteration in files.thinned_iterations():
        outputs |= files.thinned(iteration)
    return outputs


def _sound_records(files: CommittedFiles, thinned: Mapping[StageRef, str]) -> list[StageRecord]:
    records = [files.record(ref) for ref in files.refs()]
    for record in records:
        if thinned.get(record.ref) != record.sha256:
            _check_sizes(files, record)
    return sorted(records, key=lambda record: record.sequence)


def _broken_chain(where: Path, found: str) -> DamagedRun:
    # Both records are whole: which of them is the wrong one, nobody can tell.
    return DamagedRun(
        where,
        found=found,
        required="the records that were committed, in one chain",
        action="Restore the `_commits` folder from a copy of the run",
    )


def _check_sizes(files: CommittedFiles, record: StageRecord) -> None:
    for file in (*record.chunks, *record.tables):
        path = files.root / file.path
        if file.size == 0:
            continue
        try:
            size = files.stored_size(file.path)
        except FileNotFoundError:
            raise damaged(path, f"is missing; it belongs to {record.ref}") from None
        if size != file.size:
            raise damaged(path, f"holds {size} bytes, {file.size} were committed for {record.ref}")

"""The chain of commit records: every record names the hash of the one before it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from storage.committed import CommittedFiles
from storage.errors import DamagedRun, StoreError, damaged
from storage.records import StageRecord
from storage.refs import StageRef


@dataclass
class History:
    """What a writer has to know about the records so far.

    Attributes:
        digests: digest of every stored output.
        next_sequence: position of the next record.
        last_hash: hash of the newest record; of run.json when there is none.
        lost: positions of records that are gone; whoever resumes computes their outputs again.
    """

    digests: dict[StageRef, str]
    next_sequence: int
    last_hash: str
    lost: list[int] = field(default_factory=list[int])

    def append(self, record: StageRecord) -> None:
        """Take a published record into account."""
        self.digests[record.ref] = record.digest
        self.next_sequence = record.sequence + 1
        self.last_hash = record.sha256


def read_history(files: CommittedFiles, info: Mapping[str, Any], *, repair: bool) -> History:
    """The history of a run, after checking that its chain and its files are whole.

    Args:
        files: of the run.
        info: content of its run.json.
        repair: read every file, and take damaged outputs out of the run, so that they are computed again, instead of
            raising for files that are missing or cut short.

    Raises:
        DamagedRun: a record is damaged, or a file that one commits is missing or cut short.
        StoreError: what is damaged cannot be computed again.
    """
    records = _sound_records(files, repair=repair)
    for problem in chain_problems(files, records, info["sha256"]):
        raise problem
    last = records[-1] if records else None
    next_sequence = last.sequence + 1 if last else 0
    present = {record.sequence for record in records}
    return History(
        digests={record.ref: record.digest for record in records},
        next_sequence=next_sequence,
        last_hash=last.sha256 if last else info["sha256"],
        lost=[sequence for sequence in range(next_sequence) if sequence not in present],
    )


def chain_problems(files: CommittedFiles, records: Iterable[StageRecord], first_previous: str) -> Iterable[DamagedRun]:
    """The places where records, in the order of their sequence, do not follow one another.

    Gaps are no such place: they are a matter of what is stored, not of what a record says.
    """
    sequence, sha256 = -1, first_previous
    for record in records:
        where = files.record_path(record.ref)
        if record.sequence == sequence:
            yield _broken_chain(where, f"has the position {sequence} in the history that another record has")
        elif record.sequence == sequence + 1 and record.previous != sha256:
            yield _broken_chain(where, "does not follow the record before it")
        sequence, sha256 = record.sequence, record.sha256


def _sound_records(files: CommittedFiles, *, repair: bool) -> list[StageRecord]:
    records: dict[StageRef, StageRecord] = {}
    lost: set[StageRef] = set()
    for ref in files.refs():
        try:
            records[ref] = files.record(ref)
            (_check_content if repair else _check_sizes)(files, records[ref])
        except DamagedRun:
            if not repair:
                raise
            # Without its update an iteration is not complete, so whoever resumes comes back to it.
            lost |= {ref, StageRef(ref.iteration, "meta_optimize")}
    for ref in lost:
        files.record_path(ref).unlink(missing_ok=True)
    return sorted((record for ref, record in records.items() if ref not in lost), key=lambda record: record.sequence)


def _broken_chain(where: Path, found: str) -> DamagedRun:
    # Both records are whole: which of them is the wrong one, nobody can tell.
    return DamagedRun(
        where,
        found=found,
        required="the records that were committed, in one chain",
        action="Restore the `_commits` folder from a copy of the run",
    )


def _check_content(files: CommittedFiles, record: StageRecord) -> None:
    for array in {chunk.array for chunk in record.chunks}:
        _check_metadata(files, array)
    for file in (*record.chunks, *record.tables):
        if file.size:
            files.read_bytes(record, file)


def _check_metadata(files: CommittedFiles, array: str) -> None:
    try:
        files.spec(array)
    except DamagedRun as error:
        # All iterations share it and none of them could write it again: that is not for us to throw away.
        raise StoreError(
            error.where,
            found=error.found,
            required="intact metadata of the array",
            action="Restore this one file from a copy of the run, or from a run of the same sizes and iterations",
        ) from error


def _check_sizes(files: CommittedFiles, record: StageRecord) -> None:
    for file in (*record.chunks, *record.tables):
        path = files.root / file.path
        if file.size == 0:
            continue
        try:
            size = path.stat(follow_symlinks=False).st_size
        except FileNotFoundError:
            raise damaged(path, f"is missing; it belongs to {record.ref}") from None
        if size != file.size:
            raise damaged(path, f"holds {size} bytes, {file.size} were committed for {record.ref}")

"""The chain of commit records: every record names the hash of the one before it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from metaloom.storage.errors import DamagedRun, StoreError, damaged
from metaloom.storage.format.records import StageRecord
from metaloom.storage.format.refs import StageRef
from metaloom.storage.keep.thinning import marker_path
from metaloom.storage.read.ancestry import boundaries, first_sequence
from metaloom.storage.read.committed import CommittedFiles


@dataclass
class History:
    """Knowledge of the records so far that a writer needs.

    Attributes:
        digests: digest of every stored output.
        next_sequence: position of the next record.
        last_hash: hash of the newest record; of run.json when there is none.
        lost: positions of records that are gone; whoever resumes computes their outputs again.
        leftovers: files of thinned outputs that an interruption left.
    """

    digests: dict[StageRef, str]
    next_sequence: int
    last_hash: str
    lost: list[int] = field(default_factory=list[int])
    leftovers: list[Path] = field(default_factory=list[Path])

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
    thinned = _thinned_outputs(files, repair=repair)
    records = _sound_records(files, thinned, repair=repair)
    follows = boundaries(info)
    for problem in chain_problems(files, records, follows):
        raise problem
    last = records[-1] if records else None
    next_sequence = max(last.sequence + 1 if last else 0, first_sequence(info))
    present = {record.sequence for record in records}
    return History(
        digests={record.ref: record.digest for record in records},
        next_sequence=next_sequence,
        last_hash=follows.get(next_sequence) or (last.sha256 if last else info["sha256"]),
        lost=[sequence for sequence in range(next_sequence) if sequence not in present],
        leftovers=[
            path
            for record in records
            if thinned.get(record.ref) == record.sha256
            for chunk in record.chunks
            if chunk.size and (path := files.root / chunk.path).exists()
        ],
    )


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


def _thinned_outputs(files: CommittedFiles, *, repair: bool) -> dict[StageRef, str]:
    outputs: dict[StageRef, str] = {}
    for iteration in files.thinned_iterations():
        try:
            outputs |= files.thinned(iteration)
        except DamagedRun:
            if not repair:
                raise
            # What it stood for is then missing without a reason, and computed again like everything that is.
            marker_path(files.root, iteration).unlink()
    return outputs


def _sound_records(files: CommittedFiles, thinned: Mapping[StageRef, str], *, repair: bool) -> list[StageRecord]:
    records: dict[StageRef, StageRecord] = {}
    lost: set[StageRef] = set()
    for ref in files.refs():
        try:
            records[ref] = files.record(ref)
            if thinned.get(ref) == records[ref].sha256:
                continue
            (_check_content if repair else _check_sizes)(files, records[ref])
        except DamagedRun:
            if not repair:
                raise
            # Without its update an iteration is not complete, so whoever resumes comes back to it.
            lost |= {ref, files.stages.last_ref(ref.iteration)}
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
            size = files.stored_size(file.path)
        except FileNotFoundError:
            raise damaged(path, f"is missing; it belongs to {record.ref}") from None
        if size != file.size:
            raise damaged(path, f"holds {size} bytes, {file.size} were committed for {record.ref}")

"""Chain of commit records, each of which contains the hash of the previous one, and digests of spans."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from metaloom.pipeline.dataflow.refs import Span, StageRef
from metaloom.storage.errors import DamagedRun, damaged
from metaloom.storage.format.records import SpanInput, StageRecord, read_record
from metaloom.storage.format.segments import Link, ranges
from metaloom.storage.format.sessions import Head, SessionFacts, newest_session
from metaloom.storage.read.committed import CommittedFiles
from metaloom.storage.read.info import boundaries, contributors, first_iteration, first_sequence, first_session
from metaloom.storage.read.segments import Segment, Segments

_MOST_MISSING = 10**7


class Digests:
    """Digests of all stored outputs: the `live` ones are held in memory, others are read from segments on demand."""

    def __init__(self, segments: Segments, live: Mapping[StageRef, str]) -> None:
        self._segments = segments
        self._live: dict[int, dict[StageRef, str]] = {}
        for ref, digest in live.items():
            self.add(ref, digest)

    def add(self, ref: StageRef, digest: str) -> None:
        self._live.setdefault(ref.iteration, {})[ref] = digest

    def packed(self, iterations: Iterable[int]) -> None:
        """Forget the digests of outputs that are now in a segment."""
        for iteration in iterations:
            self._live.pop(iteration, None)

    def __contains__(self, ref: StageRef) -> bool:
        return ref in self._live.get(ref.iteration, ()) or self._segments.holding(ref) is not None

    def __getitem__(self, ref: StageRef) -> str:
        if (found := self._live.get(ref.iteration, {}).get(ref)) is not None:
            return found
        if (segment := self._segments.holding(ref)) is None:
            raise KeyError(ref)
        return self._segments.digest(ref, segment)

    def __iter__(self) -> Iterator[StageRef]:
        for segment in self._segments.all():
            yield from segment.seal.refs()
        for refs in [*self._live.values()]:  # copies, because the publishing thread adds to them
            yield from [*refs]

    def of(self, iteration: int) -> list[StageRef]:
        segment = self._segments.about(iteration)
        outputs = segment.seal.outputs.items() if segment else ()
        packed = [StageRef(iteration, *output) for output, parts in outputs if any(iteration in p for p in parts)]
        return [*packed, *self._live.get(iteration, ())]

    def live_iterations(self) -> list[int]:
        return [*self._live]


@dataclass
class RecordChain:
    """Facts about existing records that a writer needs."""

    digests: Digests
    next_sequence: int
    last_hash: str  # hash of the newest record, or of run.json if there is none
    head: Head | None
    lost: list[int] = field(default_factory=list[int])  # positions of missing records, whose outputs are recomputed
    newly_lost: list[int] = field(default_factory=list[int])  # lost positions unknown to the newest session
    leftovers: list[Path] = field(default_factory=list[Path])  # files of thinned outputs, left by an interruption

    def append(self, record: StageRecord) -> None:
        self.digests.add(record.ref, record.digest)
        self.next_sequence = record.sequence + 1
        self.last_hash = record.sha256
        self.head = Head.of(record)


def read_history(files: CommittedFiles, info: Mapping[str, Any]) -> RecordChain:
    """Read a run's history, checking that its chain is unbroken and its committed files are present.

    For segments, it reads only the seals and compares file sizes. Raises DamagedRun if a record or seal is damaged, or
    a committed file is missing or truncated.
    """
    known = newest_session(files.root, first_session(info))
    segments = files.segments.all(refresh=True)
    thinned = {ref: sha256 for i in files.live_markers() for ref, sha256 in files.thinned(i).items()}
    # Records that are also in a segment were left by an interrupted packing.
    live = [read_record(files.record_path(ref)) for ref in files.live_refs() if not files.segments.holding(ref)]
    records = sorted(live, key=lambda record: record.sequence)
    for record in records:
        if thinned.get(record.ref) != record.sha256:
            _check_sizes(files, record)
    for segment in segments:
        _check_files(files, segment)
    links = sealed_links(segments, records)
    follows = boundaries(info)
    for problem in (*chain_problems(files, links, follows), *head_problems(files, links, known)):
        raise problem
    last = links[-1].head if links else None
    next_sequence = max(last.sequence + 1 if last else 0, first_sequence(info), known.known if known else 0)
    lost = missing_positions(files.root, links, next_sequence)
    return RecordChain(
        digests=Digests(files.segments, {record.ref: record.digest for record in records}),
        next_sequence=next_sequence,
        last_hash=follows.get(next_sequence) or (last.sha256 if last else info["sha256"]),
        head=last,
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


def sealed_links(segments: Iterable[Segment], records: Iterable[StageRecord]) -> list[Link]:
    """Return the links of segments and of single records, in position order."""
    links = [link for segment in segments for link in segment.seal.links]
    return sorted((*links, *map(Link.of, records)), key=lambda link: link.first)


def missing_positions(root: Path, links: Iterable[Link], end: int) -> list[int]:
    """Return the positions below `end` that are in no link, in order."""
    gaps: list[range] = []
    position = 0
    for link in links:
        gaps.append(range(position, min(link.first, end)))
        position = max(position, link.head.sequence + 1)
    gaps.append(range(position, end))
    if any(gap.stop - gap.start > _MOST_MISSING for gap in gaps):
        raise damaged(root / "_commits", f"has a history that ends at position {end}, with no records before it")
    return [position for gap in gaps for position in gap]


def describe_missing(positions: Sequence[int], known: SessionFacts | None) -> str:
    """Describe missing records, and the newest of them if it is known."""
    parts = [f"{part.start} to {part[-1]}" if len(part) > 1 else f"{part.start}" for part in ranges(positions)]
    found = f"the records at positions {', '.join(parts)} of the history are missing"
    if known is None or known.head is None or known.head.sequence not in positions:
        return found
    return f"{found}; the newest that session {known.number} knew of is {known.head.ref}"


def head_problems(files: CommittedFiles, links: Iterable[Link], known: SessionFacts | None) -> Iterable[DamagedRun]:
    """Yield an error if the newest record known to the newest session has been replaced."""
    if known is None or known.head is None:
        return
    head = known.head
    for link in links:
        found = link.head
        if link.first <= head.sequence < found.sequence:  # in a segment, but not at the end of a sealed link
            found = Head.of(files.record(head.ref)) if files.contains(head.ref) else found
        if found.sequence == head.sequence and found.sha256 != head.sha256:
            where = files.record_place(found.ref)
            yield _broken_chain(where, f"not the record that session {known.number} knew at its position")


def chain_problems(files: CommittedFiles, links: Iterable[Link], follows: Mapping[int, str]) -> Iterable[DamagedRun]:
    """Yield an error per break in the chain of links, in position order. Missing records are not breaks.

    Where the hash before a position is not the previous record's, `follows` contains the expected one.
    """
    sequence, sha256 = -1, None
    for link in links:
        where = files.record_place(link.head.ref)
        before = follows.get(link.first) or (sha256 if link.first == sequence + 1 else None)
        if link.first <= sequence:
            yield _broken_chain(where, f"has position {link.first} in the history, which another record also has")
        elif before is not None and link.previous != before:
            yield _broken_chain(where, "does not follow the record before it")
        sequence, sha256 = link.head.sequence, link.head.sha256


def require_own_records(files: CommittedFiles, info: Mapping[str, Any]) -> None:
    """Raise DamagedRun if the first records lack the hash of run.json, which means that the file was replaced."""
    try:
        follows = boundaries(info)
        found = [_link_at(files, first_sequence(run), first_iteration(run)) for run in contributors(info)]
    except (KeyError, TypeError, ValueError, AttributeError):
        raise damaged(files.root / "run.json", "does not describe the run's stages and ancestors") from None
    for problem in chain_problems(files, (link for link in found if link is not None), follows):
        raise problem


def _link_at(files: CommittedFiles, sequence: int, iteration: int) -> Link | None:
    """Return the link for the record at a position, or None if it is not the iteration's first or is unreadable."""
    sealed = (link for segment in files.segments.all() for link in segment.seal.links)
    if packed := next((link for link in sealed if link.first == sequence), None):
        return packed
    for ref in (files.stages.learner_ref(0), *(StageRef(iteration, stage.name) for stage in files.stages.stages)):
        with suppress(FileNotFoundError, DamagedRun):
            record = read_record(files.record_path(ref))
            if record.sequence == sequence:
                return Link.of(record)
    return None


def _check_files(files: CommittedFiles, segment: Segment) -> None:
    for name, file in segment.seal.files.items():
        path = segment.folder / name
        try:
            size = files.stored_size(path.relative_to(files.root).as_posix())
        except FileNotFoundError as error:
            raise segment.gone(error, path) from None
        if size != file.size:
            raise damaged(path, f"holds {size} bytes, but its seal records {file.size}")


def _broken_chain(where: Path, found: str) -> DamagedRun:
    # Both records are intact, so nothing shows which one is wrong.
    return DamagedRun(
        where,
        found=found,
        required="records in one unbroken chain, each after its predecessor",
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
            raise damaged(path, f"missing; it belongs to {record.ref}") from None
        if size != file.size:
            raise damaged(path, f"holds {size} bytes, but {file.size} were committed for {record.ref}")


class SpanSums:
    """Incremental summaries of spans, which grow with the run; `num_steps` counts an output's environment steps."""

    def __init__(self, num_steps: Callable[[StageRef], int]) -> None:
        self._num_steps = num_steps
        self._digests: dict[int, dict[StageRef, str]] = {}
        self._sums: dict[tuple[tuple[str, ...], int], _Sum] = {}

    def add(self, ref: StageRef, digest: str) -> None:
        self._digests.setdefault(ref.iteration, {})[ref] = digest
        # An output recomputed after it was lost is missing from later sums.
        for key in [key for key, known in self._sums.items() if ref.stage in key[0] and ref.iteration < known.end]:
            del self._sums[key]

    def of(self, span: Span) -> SpanInput | None:
        """Return the summary of a span's outputs, or None if there are none."""
        key = (span.stages, span.first)
        known = self._sums.get(key)
        if known is None or known.end > span.last + 1:
            known = self._sums[key] = _Sum(span.first)
        for iteration in range(known.end, span.last + 1):
            digests = self._digests.get(iteration, {})
            found = (ref for ref in digests if ref in span)
            for ref in sorted(found, key=lambda ref: (ref.step, span.stages.index(ref.stage))):
                known.add(ref, digests[ref], self._num_steps(ref))
            known.end = iteration + 1
        if known.first is None or known.last is None:
            return None
        digest = known.lines.copy().hexdigest()
        return SpanInput(span.stages, known.first, known.last, known.outputs, known.steps, digest)


@dataclass
class _Sum:
    """Running summary of the outputs in a span's iterations before `end`."""

    end: int
    first: StageRef | None = None
    last: StageRef | None = None
    outputs: int = 0
    steps: int = 0
    lines: Any = field(default_factory=hashlib.sha256)

    def add(self, ref: StageRef, digest: str, num_steps: int) -> None:
        self.first, self.last = self.first or ref, ref
        self.outputs += 1
        self.steps += num_steps
        self.lines.update(f"{ref.iteration} {ref.stage} {ref.step} {digest}\n".encode())

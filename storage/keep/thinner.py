"""Thinning: removal of iterations' arrays, and their restoration."""

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

from metaloom.pipeline.dataflow.refs import StageRef
from metaloom.storage.errors import DigestMismatch, StageExists
from metaloom.storage.format.codec import Value, array_digests, differing, encode, output_digest
from metaloom.storage.format.files import make_folder
from metaloom.storage.format.provenance import versions
from metaloom.storage.format.records import StageRecord
from metaloom.storage.format.thinning import Thinned, marker_path, render_marker
from metaloom.storage.progress import Progress, unseen
from metaloom.storage.read.committed import CommittedFiles
from metaloom.storage.write.array_store import ArrayStore
from metaloom.storage.write.sessions import Session


class Thinner:
    """Removal and restoration of arrays, safe against kills and power failures at any moment."""

    def __init__(self, files: CommittedFiles, session: Session, arrays: ArrayStore) -> None:
        self._files = files
        self._session = session
        self._arrays = arrays

    def thin(self, refs: Sequence[StageRef], progress: Progress = unseen) -> Thinned:
        """Remove the outputs' arrays, skipping outputs that are already thinned."""
        taken: list[Thinned] = []
        groups = groupby(self._files.stages.sort(refs), key=lambda ref: ref.iteration)
        total = len({ref.iteration for ref in refs})
        for done, (iteration, group) in enumerate(groups):
            progress(done, total)
            before = self._valid(iteration)
            records = [self._files.record(ref) for ref in group if ref not in before]
            if records:
                # Write the marker durably first, so that missing arrays are not taken for damage.
                self._mark(iteration, before | {record.ref: record.sha256 for record in records})
                taken.append(Thinned.of(records, self._files.files_of))
                chunks = ((record, chunk) for record in records for chunk in record.chunks)
                self._session.remove([path for of in chunks for path in self._files.files_of(*of)])
                self._session.share()
        return Thinned.sum(taken)

    def restore(self, values: Mapping[StageRef, Value]) -> None:
        """Restore the arrays of one iteration's thinned outputs; see `RunWriter.restore`."""
        (iteration,) = {ref.iteration for ref in values}
        thinned = self._valid(iteration)
        records = {ref: self._files.record(ref) for ref in values}
        for ref, value in values.items():
            if ref not in thinned:
                raise StageExists(
                    self._files.record_place(ref),
                    found=f"{ref} is stored in full",
                    required="an output that was thinned",
                    action="Read it: there is nothing to restore",
                )
            require_same(records[ref], value)
        for ref, value in values.items():
            written = self._arrays.write(encode(self._files.stages, ref, value), expected=records[ref].chunks)
            assert {chunk.path for chunk in written} == {chunk.path for chunk in records[ref].chunks}
        self._mark(iteration, {ref: sha256 for ref, sha256 in thinned.items() if ref not in values})
        self._session.share()

    def _valid(self, iteration: int) -> dict[StageRef, str]:
        """Return the hashes of the records in an iteration's marker, keyed by output, omitting changed records."""
        stated = self._files.thinned(iteration).items()
        kept = [(ref, sha256) for ref, sha256 in stated if self._files.contains(ref)]
        return {ref: sha256 for ref, sha256 in kept if self._files.record(ref).sha256 == sha256}

    def _mark(self, iteration: int, outputs: Mapping[StageRef, str]) -> None:
        path = marker_path(self._files.root, iteration)
        segment = self._files.segments.about(iteration)
        # If the segment's marker lists the iteration, even an empty marker is needed, to override it.
        if not outputs and not (segment and iteration in self._files.packed_markers(segment)):
            self._session.remove([path])
            return
        make_folder(path.parent)
        self._session.put({path: (render_marker(iteration, outputs),)})


def require_same(record: StageRecord, value: Value, *, changed: Callable[[], Sequence[str]] = tuple) -> None:
    """Raise DigestMismatch if a recomputed output differs from its record; `changed` returns possible causes."""
    found = array_digests(value)
    if output_digest({name: entry.sha256 for name, entry in found.items()}) != record.digest:
        wrong, differs = differing(record.arrays, found), changed()
        changes = "; ".join([*differs, *changed_versions(record)])
        advice = "Recompute it with the recorded versions, on a processor of the same kind"
        action = f"Versions: {changes or 'the same'}. {advice}"
        if differs:
            action = f"Changed since: {changes}. Recompute it with the original sources and versions"
        raise DigestMismatch(
            str(record.ref),
            found=f"values in {', '.join(wrong[:5])} that differ from the record, so nothing was stored",
            required=f"the output with digest {record.digest[:12]}",
            action=action,
        )


def changed_versions(record: StageRecord) -> list[str]:
    """Return a phrase per version that has changed since an output was computed."""
    now = versions()
    return [
        f"{name} {record.versions.get(name, 'absent')} then, {now.get(name, 'absent')} now"
        for name in sorted({*now, *record.versions})
        if now.get(name) != record.versions.get(name)
    ]

"""Arrays of a run being written, created on first use and grown when the run is extended."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from metaloom.storage.errors import DigestMismatch, LayoutMismatch
from metaloom.storage.format.arrays import ArraySpec, crc32c, encode_chunk, encode_shard, group_document
from metaloom.storage.format.codec import Piece
from metaloom.storage.format.files import Content, make_folder, render
from metaloom.storage.format.records import StoredFile
from metaloom.storage.format.stages import METRICS_GROUP
from metaloom.storage.read.committed import CommittedFiles
from metaloom.storage.write.sessions import Session


class ArrayStore:
    """Writer of array rows for a session; large rows become shards if the run's format supports them."""

    def __init__(self, files: CommittedFiles, session: Session, *, shards: bool) -> None:
        self._files = files
        self._session = session
        self._shards = shards
        self.capacity = files.capacity()

    def grow(self, capacity: int) -> None:
        """Raise the capacity to at least `capacity` iterations, and finish an interrupted creation or growth."""
        if capacity > self.capacity:
            self._write_metadata({"": group_document({"capacity": capacity})})
            self.capacity: int = capacity
        paths = [str(file.parent.relative_to(self._files.data)) for file in self._files.data.glob("*/*/zarr.json")]
        # After a power failure, an array may exist without its group, although both were written together.
        groups = {path.partition("/")[0] for path in paths}
        lost = [group for group in groups if not (self._files.data / group / "zarr.json").exists()]
        self._write_metadata({group: group_document({}) for group in lost})
        specs = [self._files.spec(path) for path in paths]
        short = [spec for spec in specs if spec.rows != self._rows(spec.path)]
        self._write_metadata({spec.path: spec.with_rows(self._rows(spec.path)).document() for spec in short})
        self._files.forget_specs()

    def adopt(self, specs: Sequence[ArraySpec]) -> None:
        """Create empty arrays with the specs of another run's arrays and this run's capacity."""
        documents: dict[str, Mapping[str, Any]] = {spec.path.partition("/")[0]: group_document({}) for spec in specs}
        documents |= {spec.path: spec.with_rows(self._rows(spec.path)).document() for spec in specs}
        self._write_metadata(documents)

    def write(self, pieces: Sequence[Piece], *, expected: Sequence[StoredFile] | None = None) -> tuple[StoredFile, ...]:
        """Write rows durably and return the files to commit.

        Raises LayoutMismatch if a row does not match the existing array, and DigestMismatch if the files differ from
        `expected`.
        """
        self._create([piece for piece in pieces if not (self._files.data / piece.path / "zarr.json").exists()])
        files: list[StoredFile] = []
        contents: dict[Path, Content] = {}
        for piece, spec in [(piece, self._fitting_spec(piece)) for piece in pieces]:
            path = f"data.zarr/{spec.chunk_key(piece.row)}"
            if not spec.raw_bytes:  # no entries, no file
                files.append(StoredFile(path, 0, 0, piece.path))
                continue
            shard = spec.sharded
            content, crc = encode_shard(piece.data) if shard else encode_chunk(piece.data, compressed=spec.compressed)
            files.append(StoredFile(path, sum(map(len, content)), crc, piece.path))
            contents[self._files.root / path] = content
        if expected is not None and {*files} != {*expected}:
            raise DigestMismatch(
                min(file.path for file in {*files} ^ {*expected}),
                found="equal arrays, but different compressed bytes",
                required="the bytes that the record commits",
                action="Use the numcodecs version that the record names",
            )
        self._session.put(contents)
        return tuple(files)

    def write_tables(self, tables: Mapping[str, bytes]) -> tuple[StoredFile, ...]:
        """Write files, keyed by path below the run's folder, and return the files to commit."""
        make_folder(self._files.root / "tables")
        for path in tables:
            make_folder((self._files.root / path).parent)
        self._session.put({self._files.root / path: (raw,) for path, raw in tables.items()})
        return tuple(StoredFile(path, len(raw), crc32c(raw)) for path, raw in tables.items())

    def _create(self, pieces: Sequence[Piece]) -> None:
        groups = {piece.path.partition("/")[0] for piece in pieces}
        documents: dict[str, Mapping[str, Any]] = {
            group: group_document({}) for group in groups if not (self._files.data / group / "zarr.json").exists()
        }
        for piece in pieces:
            documents[piece.path] = ArraySpec.of(piece, self._rows(piece.path), shards=self._shards).document()
        self._write_metadata(documents)

    def _write_metadata(self, documents: Mapping[str, Mapping[str, Any]]) -> None:
        for path in documents:  # groups before their arrays
            make_folder(self._files.data / path)
        rendered = {path: render(document, indented=True) for path, document in documents.items()}
        self._session.put({self._files.data / path / "zarr.json": (raw,) for path, raw in rendered.items()})

    def _fitting_spec(self, piece: Piece) -> ArraySpec:
        spec = self._files.spec(piece.path)
        new = ArraySpec.of(piece, spec.rows, shards=self._shards)
        found, required = (_form(one, piece.attributes) for one in (new, spec))
        if other := [name for name in {**required, **found} if found.get(name) != required.get(name)]:
            forms = (", ".join(f"{name} {form.get(name, 'absent')}" for name in other) for form in (found, required))
            raise LayoutMismatch(
                piece.path,
                found=next(forms),
                required=f"{next(forms)}, as in the iterations already stored",
                action="Give arrays the same names, shapes and dtypes in every iteration",
            )
        return spec

    def _rows(self, path: str) -> int:
        # The learner has an additional row for the result of the last iteration.
        return self.capacity + path.startswith("learner/")


def _form(spec: ArraySpec, names: Iterable[str]) -> dict[str, str]:
    """Return the properties that an array's rows must share: shape, dtype, the named attributes, and packed entries."""
    form = {"shape": str(spec.shape), "dtype": spec.dtype}
    for name in names:
        value = spec.attributes.get(name)
        if name == "entries":  # in any order; the first iteration's order is kept
            form |= {part["name"]: f"{part['shape']} at {part['offset']}" for part in value or ()}
        elif spec.path.startswith(f"{METRICS_GROUP}/"):
            form |= dict.fromkeys(value or (), "present")
        else:
            form[name] = repr(value)
    return form

"""The readers of what others may have written, each as a function of bytes, and the errors that it documents.

Fuzzers give them any bytes. A sealed document is also sealed again, so that what lies behind its checksum is reached.
"""

import atexit
import io
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from unittest.mock import patch

from cyclopts import CycloptsError
from rich.console import Console

from metaloom.flows.cli import app
from metaloom.flows.commands.task_file import load_tasks
from metaloom.flows.errors import exit_code
from metaloom.flows.references.archive import unpack
from metaloom.flows.references.index import read_index
from metaloom.flows.run_log import LogReader
from metaloom.flows.runs import RunAt, parse_span
from metaloom.flows.sweeps.stored import Sweep, find_sweep
from metaloom.flows.trained.deployment import PolicyFile
from metaloom.flows.trust import StoredSettings
from metaloom.pipeline.config.input import load_config, override
from metaloom.pipeline.envs.contract import TaskField
from metaloom.pipeline.schema import ConfigError
from metaloom.storage import Run, open_run
from metaloom.storage.errors import StoreError
from metaloom.storage.format.arrays import ArraySpec, decode_chunk, read_spec
from metaloom.storage.format.files import render, sealed
from metaloom.storage.format.records import parse_record, read_record
from metaloom.storage.format.segments import read_seal
from metaloom.storage.format.sessions import SessionName, session_facts
from metaloom.storage.format.stages import ON_POLICY
from metaloom.storage.format.thinning import read_marker, read_packed_marker
from metaloom.storage.keep.quarantine import read_quarantine
from metaloom.storage.read.parquet import open_records, parse_table, read_columns
from metaloom.storage.remote.entries import Entry
from metaloom.storage.write.holder import current_writer

CORPUS = Path(__file__).with_name("corpus")
_FOLDER = tempfile.TemporaryDirectory(prefix="metaloom-fuzz-")
atexit.register(_FOLDER.cleanup)
FOLDER = Path(_FOLDER.name)
_FIELDS = (TaskField("x", "m", "place"), TaskField("y", "m", "place"))
_SPEC = ArraySpec("rollouts_0/rewards", 4, (20, 20, 100), "float32", ("iteration", "task", "episode", "t"), {})


def _file(name: str, raw: bytes) -> Path:
    path = FOLDER / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(raw)
    return path


def _resealed(raw: bytes, *, indented: bool = False, holder: str | None = None) -> Iterator[bytes]:
    """The bytes, and the document that they stand for under a checksum that agrees with it."""
    yield raw
    try:
        yield render(sealed(json.loads(raw), holder=holder), indented=indented)
    except (ValueError, TypeError, KeyError, RecursionError, AttributeError):
        return


def _record(raw: bytes) -> None:
    for content in _resealed(raw):
        refused(read_record, _file("records/00000000.adapt.0.json", content))


def _session(raw: bytes) -> None:
    name = f"sessions/{SessionName(1, '0123456789abcdef')}"
    for content in _resealed(raw):
        refused(session_facts, _file(f"{name}/session.json", content).parent)


def _info(raw: bytes) -> None:
    for content in _resealed(raw, indented=True):
        refused(_questioned, _file("run/run.json", content).parent)


def _questioned(path: Path) -> None:
    """What listing and showing a run asks of its run.json."""
    run: Run = open_run(path)
    _ = run.config, run.stages, run.iterations, run.refs()
    StoredSettings.of_run(run)


def _spec(raw: bytes) -> None:
    for content in _resealed(raw, indented=True, holder="attributes"):
        refused(lambda path: read_spec(path, "group/array"), _file("data/group/array/zarr.json", content).parents[2])


def _seal(raw: bytes) -> None:
    for content in _resealed(raw):
        refused(read_seal, _file("_segments/00000000-00000002/seal.json", content).parent)


def _records(raw: bytes) -> None:
    refused(lambda path: _packed(raw, path), FOLDER / "records.parquet")


def _packed(raw: bytes, path: Path) -> None:
    """What reading the records of a segment asks of their file."""
    parquet = open_records(raw, path)
    read_columns(parquet, ["iteration", "stage", "step", "digest"], path)
    for group in range(parquet.num_row_groups):
        for document in read_columns(parquet, ["document"], path, group=group)[0]:
            parse_record(str(document).encode(), path)


def _lock(raw: bytes) -> None:
    """A lock says who writes a run, or nothing: it is no part of the run, and never a reason to refuse it."""
    folder = _file("locked/writer.lock", raw).parent
    if (writer := current_writer(folder)) is not None:
        _ = str(writer), writer.is_stopped, writer.is_alive


def _marker(raw: bytes) -> None:
    for content in _resealed(raw):
        refused(lambda path: read_marker(path, ON_POLICY), _file("_thinned/00000001.json", content))
        packed = _file("_thinned/00000000-00000002.json", content)
        refused(lambda path: read_packed_marker(path, range(3), ON_POLICY), packed)


def _quarantine(raw: bytes) -> None:
    for content in _resealed(raw, indented=True):
        _in_quarantine(content, next((CORPUS / "quarantine.npy").iterdir()).read_bytes())


def _quarantined_array(raw: bytes) -> None:
    _in_quarantine(next((CORPUS / "quarantine.json").iterdir()).read_bytes(), raw)


def _in_quarantine(about: bytes, array: bytes) -> None:
    _file("_quarantine/00000001.adapt.0/000.npy", array)
    refused(_quarantined, _file("_quarantine/00000001.adapt.0/about.json", about).parents[2])


def _quarantined(path: Path) -> None:
    for fault in read_quarantine(path):
        fault.arrays()


def _sweep(raw: bytes) -> None:
    with patch.dict(os.environ, METALOOM_RUNS=str(FOLDER)):
        refused(lambda path: _trusted(find_sweep(path.stem)), _file("sweeps/hunt.json", raw))


def _trusted(sweep: Sweep | None) -> None:
    assert sweep is not None
    sweep.require_trust()


def _index(raw: bytes) -> None:
    for content in _resealed(raw, indented=True):
        refused(read_index, _file("references/index.json", content).parent)


def _archive(raw: bytes) -> None:
    folder = FOLDER / "unpacked"
    refused(lambda path: unpack(raw, path, folder), FOLDER / "reference.zip")
    shutil.rmtree(folder, ignore_errors=True)


def _entry(raw: bytes) -> None:
    for content in _resealed(raw):
        with suppress(ValueError):  # which the log reports as damage
            Entry.parse(content).content()


def _log(raw: bytes) -> None:
    for line in LogReader(_file("_operator/log.jsonl", raw).parents[1]).new_lines():
        _ = line.ref, line.is_at_least("warning")


def _arguments(raw: bytes) -> None:
    """Parse a command line, an argument per line, and run nothing."""
    tokens = raw.decode(errors="surrogateescape").splitlines()
    try:
        app.parse_args(tokens, exit_on_error=False, error_console=Console(file=io.StringIO()))
    except CycloptsError:
        pass
    except Exception as error:
        if exit_code(error) is None:
            raise


def refused(read: Callable[[Path], object], path: Path) -> None:
    """Read a file, which may be refused by a documented error and by no other."""
    try:
        read(path)
    except Exception as error:
        if exit_code(error) is None:
            raise


def _chunk(raw: bytes) -> None:
    try:
        row = decode_chunk(raw, _SPEC, FOLDER / "chunk")
    except StoreError:
        return
    assert row.shape == _SPEC.shape


def _setting(raw: bytes) -> None:
    with suppress(ConfigError):
        override({"env": {"name": "point-corner"}, "iterations": 3}, [raw.decode(errors="surrogateescape")])


def _words(raw: bytes) -> None:
    text = raw.decode(errors="surrogateescape")
    # To count the iterations of a run at a URL asks its server.
    run = re.sub("@(best|latest|-[0-9]+)$", "@1", text) if "://" in text else text.replace("@best", "@latest")
    for read in (lambda: parse_span("--iterations", text), lambda: RunAt.parse(run)):
        try:
            read()
        except Exception as error:
            if exit_code(error) is None:
                raise


READERS: dict[str, Callable[[bytes], object]] = {
    "record.json": _record,
    "session.json": _session,
    "run.json": _info,
    "zarr.json": _spec,
    "seal.json": _seal,
    "records.parquet": _records,
    "writer.lock": _lock,
    "marker.json": _marker,
    "quarantine.json": _quarantine,
    "quarantine.npy": _quarantined_array,
    "sweep.json": _sweep,
    "index.json": _index,
    "reference.zip": _archive,
    "entry.json": _entry,
    "log.jsonl": _log,
    "arguments.txt": _arguments,
    "chunk.bin": _chunk,
    "table.parquet": lambda raw: refused(lambda path: parse_table(raw, path), _file("table.parquet", b"")),
    "tasks.parquet": lambda raw: refused(lambda path: load_tasks(path, _FIELDS), _file("tasks.parquet", raw)),
    "tasks.yaml": lambda raw: refused(lambda path: load_tasks(path, _FIELDS), _file("tasks.yaml", raw)),
    "settings.yaml": lambda raw: refused(load_config, _file("settings.yaml", raw)),
    "policy.safetensors": lambda raw: refused(PolicyFile.read, _file("policy.safetensors", raw)),
    "setting.txt": _setting,
    "words.txt": _words,
}
"""Name of a kind of file -> its reader; `corpus` holds examples of each in a folder of this name."""

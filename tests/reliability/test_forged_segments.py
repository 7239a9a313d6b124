"""A segment with right checksums, made by somebody who means harm: nothing outside is touched, memory is bounded."""

import hashlib
import io
import shutil
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from metaloom import storage
from metaloom.flows.commands.train import resume
from metaloom.flows.rollouts.workers import Backend
from metaloom.storage.format.files import read_file, read_sealed, render, sealed

SEGMENT = "_segments/00000000-00000001"
SERIAL = Backend(workers=0)

pytestmark = [pytest.mark.slow, pytest.mark.no_cover]


@pytest.fixture(scope="module")
def packed(tmp_path_factory, tiny_runs):
    """A packed run; not to be changed."""
    path = shutil.copytree(tiny_runs(3), tmp_path_factory.mktemp("packed") / "run")
    with storage.open_writer(path) as writer:
        writer.pack()
    return path


@pytest.fixture
def copy(packed, tmp_path):
    """Two folders down, so that what climbs out of the run stays in the test's folder."""
    (tmp_path / "runs").mkdir()
    return shutil.copytree(packed, tmp_path / "runs" / "run")


def seal(path, change):
    """Change the seal of the segment and give it a right checksum again."""
    file = path / SEGMENT / "seal.json"
    document = read_sealed(file)
    change(document)
    file.write_bytes(render(sealed(document)))


def put(path, name, table, *, groups=None):
    """Put a table into the segment, which the seal agrees with."""
    sink = io.BytesIO()
    with pq.ParquetWriter(sink, table.schema) as writer:
        for part in groups or [table]:
            writer.write_table(part)
    raw = sink.getvalue()
    (path / SEGMENT / name).write_bytes(raw)
    about = {"size": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    seal(path, lambda document: document["files"].update({name: about}))


def loaded(path):
    """Read all of a run; the errors of the store are what it may say."""
    run = storage.open_run(path)
    return [run.record(ref) for ref in run.refs()], run.episodes(), run.metrics([0, 1])


SEALS = {
    "outputs of other iterations": lambda d: d["outputs"][0].update(iterations=[[0, 10**8]]),
    "an output of a stage that is none": lambda d: d["outputs"][0].update(stage="../../x"),
    "an output of a step that is none": lambda d: d["outputs"][0].update(step=10**6),
    "a file of the system": lambda d: d["files"].update({"/etc/passwd": {"size": 10**6, "sha256": "0" * 64}}),
    "a file above it": lambda d: d["files"].update({"../../x": {"size": 1, "sha256": "0" * 64}}),
    "a file that no system has": lambda d: d["files"].update({"a\0b": {"size": 1, "sha256": "0" * 64}}),
    "no records": lambda d: d["files"].pop("records.parquet"),
    "an array above it": lambda d: d["arrays"].update({"../../x": {"first_row": 0, "rows": 1, "sharded": True}}),
    "rows before the first": lambda d: [array.update(first_row=-1) for array in d["arrays"].values()],
    "no rows": lambda d: [array.update(rows=0) for array in d["arrays"].values()],
    "no parts of the chain": lambda d: d.update(links=[]),
    "a part of the chain that begins later": lambda d: d["links"][0].update(first=5),
    "a session above it": lambda d: d.update(sessions=[[1, "../../../x"]]),
}


@pytest.mark.parametrize("forgery", SEALS)
def test_a_seal_that_no_packing_writes_is_named_refused_and_taken_apart(copy, packed, digests, forgery):
    seal(copy, SEALS[forgery])
    if "the chain" not in forgery:  # which only a look at all records tells
        with pytest.raises(storage.DamagedRun, match=r"seal\.json"):
            loaded(copy)
    assert f"{SEGMENT}/seal.json" in {damage.file for damage in storage.verify_run(copy)}
    assert resume(copy, repair=True, backend=SERIAL).damage == []
    assert digests(copy) == digests(packed)


def test_a_repair_writes_no_array_outside_of_the_run(copy, tmp_path):
    shutil.copytree(copy / "data.zarr/tasks/params", copy / "x")  # the same as seen from the segment
    seal(copy, lambda d: d["arrays"].update({"../../../x": d["arrays"]["tasks/params"]}))
    resume(copy, repair=True, backend=SERIAL)
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def test_a_repair_writes_no_session_outside_of_the_run(copy, tmp_path):
    (copy / "_sessions/000000-").mkdir()  # the beginning of a way out
    record = copy / "_commits" / storage.StageRef(2, "sample_tasks").file_name
    document = read_sealed(record) | {"session": 0, "token": "/../../../../x"}
    record.write_bytes(render(sealed(document)))
    (damage, *_) = [damage for damage in storage.verify_run(copy) if damage.file == f"_commits/{record.name}"]
    assert "token" in damage.problem
    resume(copy, repair=True, backend=SERIAL)
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def _column(table, name, values):
    return table.set_column(table.schema.get_field_index(name), name, pa.array(values))


def _same(table, text):
    """One text in every row: in the file it stands once."""
    return pa.DictionaryArray.from_arrays(pa.array([0] * table.num_rows, pa.int32()), [text])


RECORDS = {
    "documents that are numbers": lambda t: _column(t, "document", range(t.num_rows)),
    "documents that are bytes": lambda t: _column(t, "document", [b"\xff"] * t.num_rows),
    "no documents": lambda t: _column(t, "document", pa.nulls(t.num_rows, pa.string())),
    "no column of documents": lambda t: t.drop(["document"]),
    "other digests": lambda t: _column(t, "digest", ["0" * 64] * t.num_rows),
    "documents that are long": lambda t: _column(t, "document", _same(t, "x" * 2**26)),
    "stages that are long": lambda t: _column(t, "stage", _same(t, "x" * 2**26)),
    "lists of documents": lambda t: _column(t, "document", [["x"]] * t.num_rows),
    "no stages": lambda t: _column(t, "stage", [b"\xff"] * t.num_rows),
    "none at all": lambda t: t.slice(0, 0),
}


@pytest.mark.parametrize("forgery", RECORDS)
def test_records_that_are_none_are_named_and_refused(copy, packed, digests, forgery):
    put(copy, "records.parquet", RECORDS[forgery](pq.read_table(copy / SEGMENT / "records.parquet")))
    # Refused before the text is made: all rows of it take a gigabyte.
    found = "has a column of [0-9]+ bytes" if "long" in forgery else ""
    with pytest.raises(storage.DamagedRun, match=rf"records\.parquet: {found}"):
        loaded(copy)
    assert {damage.file for damage in storage.verify_run(copy)} == {f"{SEGMENT}/records.parquet"}
    assert resume(copy, repair=True, backend=SERIAL).damage == []
    assert digests(copy) == digests(packed)


@pytest.mark.parametrize("ends", [(0, 0, None), (0, 3, 4, None), (0, 1, None)])
def test_records_in_groups_that_no_packing_writes_are_named_and_refused(copy, ends):
    table = pq.read_table(copy / SEGMENT / "records.parquet")
    groups = [table[first:stop] for first, stop in pairwise(ends)]
    put(copy, "records.parquet", table, groups=groups)
    with pytest.raises(storage.DamagedRun, match=r"records\.parquet: has groups"):
        loaded(copy)
    assert f"{SEGMENT}/records.parquet" in {damage.file for damage in storage.verify_run(copy)}


TABLES = {
    "no iterations": lambda t: t.drop(["iteration"]),
    "iterations twice": lambda t: t.append_column("iteration", t["iteration"]),
    "iterations in words": lambda t: _column(t, "iteration", ["first"] * t.num_rows),
    "lists": lambda t: _column(t, "step", [[1]] * t.num_rows),
    "words": lambda t: _column(t, "return", _same(t, "x" * 2**26)),
}


@pytest.mark.parametrize("forgery", TABLES)
def test_tables_that_are_none_are_named_refused_and_written_again(copy, packed, forgery):
    put(copy, "tables/episodes.parquet", TABLES[forgery](pq.read_table(copy / SEGMENT / "tables/episodes.parquet")))
    with pytest.raises(storage.DamagedRun, match="tables"):
        storage.open_run(copy).episodes()
    assert {damage.file for damage in storage.verify_run(copy)} == {f"{SEGMENT}/tables/episodes.parquet"}
    assert resume(copy, repair=True, backend=SERIAL).damage == []
    assert storage.open_run(copy).episodes().equals(storage.open_run(packed).episodes())


def test_a_device_in_place_of_a_file_is_not_read():
    with pytest.raises(storage.DamagedRun, match="device"):
        read_file(Path("/dev/zero"), limit=2**20)

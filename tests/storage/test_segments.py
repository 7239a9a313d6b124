"""Damaged and forged segments: every reader names the file and what is wrong with it, whatever its checksum."""

import errno
import hashlib
import io
import os
import shutil
from itertools import pairwise

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from metaloom import storage
from metaloom.storage import StageRef
from metaloom.storage.format.files import read_sealed, render, sealed
from metaloom.storage.format.segments import index_size, shard_index
from metaloom.storage.read import parquet
from metaloom.storage.read.history import Digests
from metaloom.storage.read.segments import Segments

NAME = "00000000-00000001"
SEGMENT = f"_segments/{NAME}"
ROLLOUTS = StageRef(1, "collect_rollouts")


@pytest.fixture(scope="module")
def packed(tmp_path_factory, creation, put, make_batches):
    """A run of three small iterations, two of them in a segment; not to be changed."""
    path, batches = tmp_path_factory.mktemp("packed") / "run", make_batches(B=2, E=1, T=3)
    with storage.create_run(path, capacity=3, **creation) as writer:
        for i in range(3):
            put(writer, batches.iteration(i))
        writer.pack()
    return path


@pytest.fixture
def path(packed, tmp_path):
    return shutil.copytree(packed, tmp_path / "run")


def seal(path, change, name=NAME):
    """Change a seal and give it a right checksum again."""
    file = path / "_segments" / name / "seal.json"
    document = read_sealed(file)
    change(document)
    file.write_bytes(render(sealed(document)))


def put_file(path, name, raw):
    """Replace a file of the segment, and its size and hash in the seal."""
    (path / SEGMENT / name).write_bytes(raw)
    about = {"size": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    seal(path, lambda document: document["files"].update({name: about}))


def put_table(path, name, table, ends=(0, None)):
    """Replace a table of the segment by one with a group of rows between each two ends."""
    sink = io.BytesIO()
    with pq.ParquetWriter(sink, table.schema) as writer:
        for first, stop in pairwise(ends):
            writer.write_table(table[first:stop])
    put_file(path, name, sink.getvalue())


def shard(path, array="rollouts_0/rewards"):
    (file,) = (path / SEGMENT / "data.zarr" / array).glob("c.*")
    return file


def other_iterations(document):
    document.update(iterations=[1, 2])
    for output in document["outputs"]:
        output["iterations"] = [[1, 2]]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda d: d.update(schema="metaloom/99"), "schema 'metaloom/99'"),
        (lambda d: d.update(iterations=[1, 1]), "invalid iterations: 1 up to but not including 1"),
        (lambda d: d.update(iterations=[-1, 2]), "iterations: -1 up to but not including 2"),
        (lambda d: d.update(iterations=[0, 10**8 + 1]), "iterations: 0 up to but not including 100000001"),
        (lambda d: d.update(iterations=[0, 3]), "contains the seal of 00000000-00000002"),
        (lambda d: d["outputs"][0].update(iterations=[[0, 3]]), "has iterations outside the segment, 0 to 2"),
        (lambda d: d["outputs"][0].update(iterations=[[0, 1], [1, 3]]), "has iterations outside the segment, 1 to 2"),
        (lambda d: d["arrays"]["tasks/ids"].update(rows=0), "rows of the array 'tasks/ids': 0 from row 0"),
        (lambda d: d["arrays"]["tasks/ids"].update(first_row=-1), "of the array 'tasks/ids': .* from row -1"),
        (lambda d: d["arrays"].update({"../x": d["arrays"]["tasks/ids"]}), r"of the array '\.\./x'"),
        (lambda d: d["files"].update({"../x": {"size": 1, "sha256": ""}}), r"unexpected file name '\.\./x'"),
        (lambda d: d["files"].pop("records.parquet"), r"records\.parquet is not among the files"),
        (lambda d: d.update(sessions=[[1, "../x"]]), r"session number 1 or token '\.\./x'"),
    ],
)
def test_an_impossible_seal_is_refused_before_its_names_and_sizes_are_used(path, change, problem):
    seal(path, change)
    with pytest.raises(storage.DamagedRun, match=rf"{NAME}/seal\.json: .*{problem}"):
        storage.open_run(path).refs()


def test_two_segments_with_the_same_iteration_are_refused(path):
    name = "00000001-00000001"
    shutil.copytree(path / SEGMENT, path / "_segments" / name)
    seal(path, other_iterations, name)
    with pytest.raises(storage.DamagedRun, match=f"{name}: covers iterations that {NAME} also covers"):
        storage.open_run(path).refs()
    assert any("also covers" in damage.problem for damage in storage.verify_run(path))


def test_files_that_do_not_belong_to_a_segment_are_reported_and_its_outputs_are_counted(path):
    told = []
    assert storage.verify_run(path, lambda *numbers: told.append(numbers)) == []
    assert told == [(n, 22) for n in range(22)]  # 15 outputs in the segment, and 7 others
    strangers = [f"{SEGMENT}/{name}" for name in ("data.zarr/notes/c.0", "data.zarr/tasks/ids/notes.txt", "notes.txt")]
    for name in strangers:
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).touch()
    assert [damage.file for damage in storage.verify_run(path)] == strangers


def test_a_run_json_that_was_changed_is_refused_although_all_it_describes_is_packed(path):
    info = read_sealed(path / "run.json", indented=True)
    info["config"]["seed"] = 2
    (path / "run.json").write_bytes(render(sealed(info), indented=True))
    with pytest.raises(storage.DamagedRun, match="does not follow the record before it"):
        storage.open_run(path)


def test_links_that_the_records_do_not_form_are_found_by_verification(path):
    seal(path, lambda document: document["links"][0].update(previous="0" * 64))
    problems = [damage.problem for damage in storage.verify_run(path) if damage.file == f"{SEGMENT}/seal.json"]
    assert "does not list the chain links that its records form" in problems


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("seal.json", lambda run: storage.open_run(run.path)),
        ("records.parquet", lambda run: run.record(ROLLOUTS)),
        ("tables/episodes.parquet", lambda run: run.episodes()),
        ("data.zarr/rollouts_0/rewards/c.0.0.0.0", lambda run: run[1].rollouts(0)),
    ],
)
def test_a_missing_file_of_a_segment_is_named_by_readers_and_by_the_writer(path, name, read):
    run = storage.open_run(path)
    (path / SEGMENT / name).unlink()
    for use in (lambda: read(run), lambda: storage.open_writer(path)):
        with pytest.raises(storage.DamagedRun, match=f"{SEGMENT}/{name}: missing"):
            use()


@pytest.mark.parametrize("name", ["records.parquet", "tables/episodes.parquet"])
def test_a_file_changed_or_cut_short_is_named_by_readers_and_refused_by_the_writer(path, name):
    file = path / SEGMENT / name
    raw, size = file.read_bytes(), file.stat().st_size
    for content in (bytes([*raw[:9], raw[9] ^ 1, *raw[10:]]), raw[:-1]):
        file.write_bytes(content)
        run = storage.open_run(path)
        with pytest.raises(storage.DamagedRun, match=f"{file.name}: its size or SHA-256 does not match the seal"):
            run.episodes() if "tables" in name else run.record(ROLLOUTS)
    with pytest.raises(storage.DamagedRun, match=f"{file.name}: holds {size - 1} bytes, but its seal records {size}"):
        storage.open_writer(path)


def test_a_file_of_a_segment_that_became_a_folder_is_named_by_the_writer(path):
    file = path / SEGMENT / "tables/episodes.parquet"
    file.unlink()
    file.mkdir()
    with pytest.raises(storage.DamagedRun, match=r"episodes\.parquet: a folder"):
        storage.open_writer(path)


def _column(table, name, values):
    return table.set_column(table.schema.get_field_index(name), name, pa.array(values))


def _rotated(table, name):
    values = table[name].to_pylist()
    return _column(table, name, values[1:] + values[:1])


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda t: _column(t, "stage", ["../x"] * t.num_rows), r"names no outputs \(.*x"),
        (lambda t: _column(t, "step", ["first"] * t.num_rows), r"names no outputs \(.*first"),
        (lambda t: t.slice(1), "does not contain the records that the seal lists"),
        (lambda t: _column(t, "document", pa.nulls(t.num_rows, pa.string())), "a document is missing"),
        (lambda t: t.drop(["document"]), "not a table of records .*document"),
        (lambda t: _column(t, "document", [b"\xff"] * t.num_rows), "not a table of records .*UTF8"),
        (lambda t: _column(t, "document", ["{}"] * t.num_rows), "does not match its checksum"),
        (lambda t: _rotated(t, "document"), r"has the record of .* instead of collect_rollouts\(i=1, k=0\)"),
        (lambda t: _rotated(t, "digest"), r"lists a digest of collect_rollouts\(i=1, k=0\) that differs"),
    ],
)
def test_a_table_of_other_records_than_the_seals_is_refused(path, change, problem):
    put_table(path, "records.parquet", change(pq.read_table(path / SEGMENT / "records.parquet")))
    with pytest.raises(storage.DamagedRun, match=rf"records\.parquet: .*{problem}"):
        storage.open_run(path).record(ROLLOUTS)
    assert {damage.file for damage in storage.verify_run(path)} == {f"{SEGMENT}/records.parquet"}


@pytest.mark.parametrize("ends", [(0, 4, 8, 12, None), (0, 5, 10, None), (0, 8, None)])
def test_records_in_groups_of_one_size_and_a_rest_are_read(path, packed, ends):
    put_table(path, "records.parquet", pq.read_table(path / SEGMENT / "records.parquet"), ends)
    run, before = storage.open_run(path), storage.open_run(packed)
    assert [run.record(ref) for ref in run.refs()] == [before.record(ref) for ref in before.refs()]


@pytest.mark.parametrize("ends", [(0, 0, None), (0, 3, 4, None), (0, 1, None), (0, 4, 8, 11, None), (0, 4, 8, 8, None)])
def test_records_in_groups_of_different_sizes_are_refused(path, ends):
    put_table(path, "records.parquet", pq.read_table(path / SEGMENT / "records.parquet"), ends)
    with pytest.raises(storage.DamagedRun, match=r"records\.parquet: has groups of \["):
        storage.open_run(path).record(ROLLOUTS)


@pytest.mark.parametrize("name", ["records.parquet", "tables/episodes.parquet"])
def test_a_file_that_is_no_table_is_refused_whatever_its_checksum(path, name):
    put_file(path, name, b"PAR1" + bytes(100) + b"PAR1")
    run = storage.open_run(path)
    with pytest.raises(storage.DamagedRun, match=r"parquet: not a table"):
        run.episodes() if "tables" in name else run.record(ROLLOUTS)
    assert [damage.file for damage in storage.verify_run(path)] == [f"{SEGMENT}/{name}"]


def test_a_table_of_a_segment_may_have_eight_times_the_cells_of_one_of_an_iteration(path, monkeypatch):
    run = storage.open_run(path)
    columns, rows = run.episodes([0, 1]).num_columns, 8
    monkeypatch.setattr(parquet, "_MOST_CELLS", columns)
    assert run.episodes([0, 1]).num_rows == rows
    monkeypatch.setattr(parquet, "_MOST_CELLS", columns - 1)
    with pytest.raises(storage.DamagedRun, match=f"claims {rows} rows of {columns} columns"):
        run.episodes([0, 1])


def test_tables_that_no_schema_has_room_for_are_named(path):
    table = pq.read_table(path / SEGMENT / "tables/episodes.parquet")
    put_table(path, "tables/episodes.parquet", _column(table, "return", [True] * table.num_rows))
    with pytest.raises(storage.DamagedRun, match="tables of episodes with different schemas"):
        storage.open_run(path).episodes()


@pytest.mark.parametrize(
    ("sizes", "problem"),
    [
        (lambda n: [0, n + 1], "points beyond the end"),
        (lambda n: [n, 1], "points beyond the end"),
        (lambda n: [0, 2**20], "points beyond the end"),
        (lambda n: [n, None], "missing"),
    ],
    ids=["a part longer than all", "a part after the last", "a part longer than a row", "no part"],
)
def test_an_index_that_points_elsewhere_is_refused_whatever_its_checksum(path, sizes, problem):
    file = shard(path)
    data = file.read_bytes()[: -index_size(2)]
    file.write_bytes(data + shard_index(sizes(len(data))))
    with pytest.raises(storage.DamagedRun, match=rf"rollouts_0/rewards/c\..*{problem}"):
        storage.open_run(path)[1].rollouts(0)


def test_an_index_that_is_changed_or_cut_short_is_refused(path):
    file = shard(path)
    raw = bytearray(file.read_bytes())
    raw[-index_size(2)] ^= 1
    file.write_bytes(raw)
    with pytest.raises(storage.DamagedRun, match="its index does not match the index's CRC-32C"):
        storage.open_run(path)[1].rollouts(0)
    os.truncate(file, index_size(2) - 1)
    with pytest.raises(storage.DamagedRun, match=f"holds {index_size(2) - 1} bytes, fewer than its index needs"):
        storage.open_run(path)[1].rollouts(0)
    file.write_bytes(shard_index([None, None]))  # no data at all, and the index says so
    with pytest.raises(storage.DamagedRun, match=r"rollouts_0/rewards/c.*: missing"):
        storage.open_run(path)[1].rollouts(0)


def test_a_part_is_read_up_to_the_largest_size_that_its_row_can_have(path):
    files = storage.open_run(path).files
    spec, (segment,) = files.spec("rollouts_0/rewards"), files.segments.all()
    raw = segment.read_chunk(spec, 1, limit=10**6)
    assert segment.read_chunk(spec, 1, limit=len(raw)) == raw
    with pytest.raises(storage.DamagedRun, match="points beyond the end of its data"):
        segment.read_chunk(spec, 1, limit=len(raw) - 1)


def test_a_disk_that_fails_in_the_middle_of_a_shard_is_named(path, monkeypatch):
    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "pread", fail)
    with pytest.raises(storage.DamagedRun, match=r"rollouts_0/[a-z_]+/c\.[0.]+: Input/output error"):
        storage.open_run(path)[1].rollouts(0)


def test_an_output_that_is_neither_live_nor_packed_has_no_digest(path):
    digests = Digests(Segments(path), {StageRef(2, "adapt"): "abc"})
    assert digests[StageRef(2, "adapt")] == "abc"
    assert digests[ROLLOUTS] == storage.open_run(path).record(ROLLOUTS).digest
    with pytest.raises(KeyError, match="sample_tasks"):
        digests[StageRef(2, "sample_tasks")]

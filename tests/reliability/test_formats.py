"""Runs of every released format are read for ever, by the library and by a reader that shares nothing with it."""

import re
import runpy
import shutil
from pathlib import Path

import numcodecs.blosc
import numpy as np
import pytest
from archives import unpack

from metaloom import storage
from metaloom.flows.commands.fork import fork
from metaloom.flows.commands.thin import thin
from metaloom.flows.commands.train import config_of, resume
from metaloom.flows.rollouts.workers import Backend
from metaloom.storage.format.codec import flatten
from metaloom.storage.format.files import render, sealed

FIXTURES = sorted((Path(__file__).parents[1] / "fixtures").glob("metaloom-*"))
EARLIER_RUNS = Path(__file__).parents[1] / "fixtures" / "runs-0.1.tar.gz"
READER = Path(__file__).parents[2] / "examples" / "independent_reader.py"


@pytest.fixture(scope="module")
def reader():
    """The functions of the example."""
    return runpy.run_path(str(READER))


@pytest.fixture(params=[path.name for path in FIXTURES])
def old_run(request):
    return next(path for path in FIXTURES if path.name == request.param)


def agree(reader, path):
    run, records = storage.open_run(path), reader["history"](path)
    assert len(records) == len(run.refs())
    for record in records:
        ref = storage.StageRef(record["iteration"], record["stage"], record["step"])
        assert reader["is_thinned"](path, record) == run.is_thinned(ref)
        if run.is_thinned(ref):
            continue
        expected = flatten(run.load(ref))
        found = reader["read_output"](path, record)
        assert found.keys() == expected.keys()
        assert all(bits(found[name]) == bits(expected[name]) for name in expected), ref
        assert record["digest"] == run.record(ref).digest
    for name, read in {"episodes": run.episodes, "tasks": run.tasks, "metrics": run.metrics}.items():
        for i in run.iterations:
            table = read(i)
            held = [column for column in table.column_names if table[column].null_count < len(table)]  # of this fork
            assert reader["read_table"](path, name, i).equals(table.select(held)), (name, i)
    for i in {ref.iteration for ref in run.refs() if ref.stage == "evaluate"}:
        assert reader["read_table"](path, "evaluations", i).equals(run.evaluations(i))


def read_all(reader, path):
    for record in reader["history"](path):
        reader["read_output"](path, record)
        for table in record["tables"]:
            reader["read_table"](path, table["path"].split("/")[1], record["iteration"])


def bits(array):
    return array.dtype, array.shape, array.tobytes()


def test_there_is_a_run_of_every_released_format():
    assert [path.name for path in FIXTURES] == ["metaloom-1"]


def test_a_run_of_an_old_format_is_whole_and_its_batches_and_tables_are_read(old_run):
    assert storage.verify_run(old_run) == []
    run = storage.open_run(old_run)
    assert len(run) == 2
    assert all(storage.output_digest(storage.digest(run.load(ref))) == run.record(ref).digest for ref in run.refs())
    assert run.steps().num_rows == sum(run.episodes()["length"].to_pylist())
    assert run[0].xarray(0).sizes["task"] == 2
    assert run.lineage().num_rows == len(run.refs())


def test_a_run_of_an_old_format_can_be_gone_on_with(old_run, tmp_path):
    shutil.copytree(old_run, tmp_path / "run")
    assert config_of(storage.open_run(tmp_path / "run")).iterations == 2
    resume(tmp_path / "run", iterations=3, backend=Backend(workers=0))
    assert len(storage.open_run(tmp_path / "run")) == 3
    assert storage.verify_run(tmp_path / "run") == []


def test_the_independent_reader_agrees_with_the_library_on_every_old_format(old_run, reader):
    agree(reader, old_run)


def test_the_independent_reader_agrees_with_the_library_on_a_run_with_lost_and_repeated_outputs(
    reader, tmp_path, train_tiny, finish
):
    path = train_tiny(tmp_path / "run", iterations=3, max_episode_steps=2100)
    assert storage.open_run(path).files.spec("rollouts_0/observations").sharded
    (path / "_commits" / storage.StageRef(1, "adapt").file_name).unlink()
    (path / "_commits" / storage.StageRef(2, "meta_optimize").file_name).unlink()
    finish(path)
    agree(reader, path)


def test_the_independent_reader_agrees_with_the_library_on_forks_that_are_evaluated_and_thinned(
    reader, tmp_path, train_tiny
):
    evaluation = {"every": 2, "num_tasks": 2, "adaptation_steps": 1, "test_episodes": 2}
    first = train_tiny(tmp_path / "first", iterations=3, evaluation=evaluation)
    limited = ["algorithm.max_grad_norm=1"]  # adds a metric
    for parent, iteration, name, more in (
        (first, 2, "child", limited),
        (tmp_path / "child", 1, "early", []),
        (tmp_path / "early", 2, "last", limited),
    ):
        fork(parent, iteration, tmp_path / name, ["algorithm.clip_eps=0.1", *more])
        resume(tmp_path / name, backend=Backend(workers=0))
        thin(parent, storage.Retention(keep_every=2))
        agree(reader, parent)
        agree(reader, tmp_path / name)
    info = tmp_path / "last" / "run.json"
    moved = tmp_path / "early" / "run.json"
    info.write_bytes(moved.read_bytes())
    with pytest.raises(AssertionError, match="follows another one"):
        reader["history"](tmp_path / "last")


def test_the_independent_reader_agrees_with_the_library_on_packed_runs(reader, tmp_path, train_tiny):
    evaluation = {"every": 2, "num_tasks": 2, "adaptation_steps": 1, "test_episodes": 2}
    path = train_tiny(tmp_path / "run", iterations=4, evaluation=evaluation, max_episode_steps=2100)
    thin(path, storage.Retention(keep_every=2))
    with storage.open_writer(path) as writer:
        writer.pack()
    agree(reader, path)
    fork(path, 2, tmp_path / "fork")
    thin(path, storage.Retention(keep_last=1))
    resume(tmp_path / "fork", backend=Backend(workers=0))
    agree(reader, path)
    agree(reader, tmp_path / "fork")


@pytest.mark.parametrize("name", ["sac", "pearl"])
def test_the_independent_reader_agrees_with_the_library_on_runs_whose_records_name_spans(reader, tmp_path, name):
    unpack(EARLIER_RUNS, tmp_path)
    path = tmp_path / name
    agree(reader, path)  # two iterations without spans
    fork(path, 1, tmp_path / "fork")
    for run in (path, tmp_path / "fork"):
        resume(run, iterations=3, backend=Backend(workers=0))
        thin(run, storage.Retention(keep_last=1))
        agree(reader, run)
        records = reader["history"](run)
        assert {r["iteration"] for r in records if "spans" in r} == ({2} if run == path else {1, 2})
        replace_digest(run, records[-1])
        with pytest.raises(AssertionError, match="was computed from other outputs"):
            reader["history"](run)


def replace_digest(path, record):
    """Has a record that names a span, the newest, say that it was computed from other outputs."""
    ref = storage.StageRef(record["iteration"], record["stage"], record["step"])
    document = {name: value for name, value in record.items() if name != "sha256"}
    document["spans"][-1]["digest"] = "0" * 64
    (path / "_commits" / ref.file_name).write_bytes(render(sealed(document)))


def test_the_independent_reader_notices_a_flipped_byte_in_every_file_that_it_reads(old_run, reader, tmp_path):
    shutil.copytree(old_run, tmp_path / "run")
    path = tmp_path / "run"
    groups = {path / "data.zarr/zarr.json", *path.glob("data.zarr/*/zarr.json")}
    files = [file for file in sorted(path.rglob("*")) if file.is_file() and file not in groups]
    read = [file for file in files if "_sessions" not in file.parts]  # asked only where records are missing
    for file in read[:: max(1, len(read) // 25)]:
        content = file.read_bytes()
        middle = len(content) // 2
        file.write_bytes(content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :])
        with pytest.raises((AssertionError, ValueError, KeyError)):
            read_all(reader, path)
        file.write_bytes(content)
    agree(reader, path)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64", "uint8", "bool"])
@pytest.mark.parametrize("entries", [16_400, 70_001, 600_000])
@pytest.mark.parametrize("content", ["random", "smooth", "zeros"])
def test_the_independent_reader_decompresses_whatever_blosc_compresses(reader, dtype, entries, content):
    rng = np.random.default_rng(0)
    values = {"random": rng.bytes(entries * 8), "smooth": np.arange(entries).tobytes(), "zeros": bytes(entries * 8)}
    array = np.frombuffer(values[content], "u1")[: entries * np.dtype(dtype).itemsize].view("u1")
    array = (array % 2).view("bool") if dtype == "bool" else array.view(dtype)
    compressed = numcodecs.blosc.Blosc("lz4", clevel=5, shuffle=1).encode(array)
    assert reader["decompress"](compressed) == array.tobytes()


def test_the_reader_uses_nothing_but_numpy_pyarrow_and_the_standard_library(reader):
    assert set(re.findall(r"^(?:import|from) (\w+)", READER.read_text(encoding="utf-8"), re.MULTILINE)) == {
        *("hashlib", "json", "struct", "sys", "math", "pathlib"),
        *("numpy", "pyarrow"),
    }

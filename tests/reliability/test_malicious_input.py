"""Runs, settings and names from somebody who means harm: no code runs, nothing outside is touched, memory is bounded.

More of it lies beside what it attacks: test_hostile_runs.py and test_paths.py in tests/storage, test_plain_yaml.py in
tests/pipeline.
"""

import contextlib
import os
import pickle
import re
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from metaloom import storage
from metaloom.storage.format.arrays import crc32c
from metaloom.storage.format.files import read_sealed, render, sealed

UNSAFE = re.compile(
    r"\b(?:import|from) (?:pickle|cloudpickle|marshal|shelve|dill|joblib)\b|allow_pickle(?!=False)|\btorch\.load\b"
    r"|\byaml\.(?:unsafe_load|full_load|load)\b|(?<![.\w])(?:eval|exec)\("
)


@pytest.mark.parametrize("package", ["pipeline", "stages", "storage", "flows"])
def test_no_package_contains_what_could_run_what_it_reads(pytestconfig, package):
    sources = sorted((pytestconfig.rootpath / package).rglob("*.py"))
    assert len(sources) > 5
    found = {
        str(file.relative_to(pytestconfig.rootpath)): matches
        for file in sources
        if (matches := UNSAFE.findall(file.read_text(encoding="utf-8")))
    }
    assert found == {}


def commit_table(path, name, raw):
    """Put a table into a run with records that agree with it, as an attacker would."""
    (path / f"tables/{name}/00000000.parquet").write_bytes(raw)
    record = path / "_commits" / storage.StageRef(0, "meta_optimize").file_name
    document = read_sealed(record)
    (entry,) = [table for table in document["tables"] if f"/{name}/" in table["path"]]
    entry.update(size=len(raw), crc32c=crc32c(raw))
    record.write_bytes(render(sealed(document)))


def parquet(table):
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize("columns", [1, 5000])
def test_a_table_of_a_few_kilobytes_that_stands_for_gigabytes_is_refused(tmp_path, train_tiny, columns):
    path = train_tiny(tmp_path / "run", iterations=1)
    rows = 2**25 // columns
    raw = parquet(pa.table({f"c{i}": np.zeros(rows, np.int64) for i in range(columns)}))
    assert len(raw) < 2**22
    commit_table(path, "episodes", raw)
    with pytest.raises(storage.DamagedRun, match=r"episodes/00000000.parquet: claims \d+ rows"):
        storage.open_run(path).episodes()


@pytest.mark.parametrize("raw", [b"", b"PAR1", b"PAR1" + bytes(100) + b"PAR1", b"\x80\x04."])
def test_a_table_that_is_none_is_refused_whatever_its_checksum(tmp_path, train_tiny, raw):
    path = train_tiny(tmp_path / "run", iterations=1)
    commit_table(path, "episodes", raw)
    with pytest.raises(storage.DamagedRun, match=r"episodes/00000000.parquet"):
        storage.open_run(path).episodes()


READ = """
import resource, sys
from metaloom import storage
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    storage.open_run(sys.argv[1])[0].tasks()
except storage.StoreError as error:
    print(type(error).__name__)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
def test_a_document_of_millions_of_small_values_is_refused_with_bounded_memory(tmp_path, train_tiny):
    path, element = train_tiny(tmp_path / "run", iterations=1), "{}"
    count = (2**24 - 100) // (len(element) + 1)
    (path / "_commits" / storage.StageRef(0, "sample_tasks").file_name).write_text(
        '{"chunks":[' + ",".join([element] * count) + "]}\n"
    )
    done = subprocess.run([sys.executable, "-c", READ, str(path)], capture_output=True, text=True, check=True)
    kind, kilobytes = done.stdout.split()
    assert kind == "DamagedRun"
    assert int(kilobytes) < 1.5 * 2**20


def test_a_document_beyond_all_measure_is_not_even_read(tmp_path, train_tiny):
    path = train_tiny(tmp_path / "run", iterations=1)
    os.truncate(path / "run.json", 2**40)
    with pytest.raises(storage.DamagedRun, match="more than"):
        storage.open_run(path)


@pytest.mark.parametrize("name", ["record", "session"])
def test_a_position_beyond_all_measure_in_the_history_takes_no_memory(tmp_path, train_tiny, name):
    path = train_tiny(tmp_path / "run", iterations=1)
    (session,) = path.glob("_sessions/*/session.json")
    file = session if name == "session" else path / "_commits" / storage.StageRef(0, "meta_optimize").file_name
    document = read_sealed(file)
    (document["head"] if name == "session" else document)["sequence"] = 10**12
    file.write_bytes(render(sealed(document)))
    problems = [damage.problem for damage in storage.verify_run(path) if damage.file == "_commits"]
    assert [problem for problem in problems if "a history that ends at position 1000000000" in problem]
    with pytest.raises(storage.DamagedRun):
        storage.open_writer(path)


@pytest.mark.parametrize("name", ["run.json", "_commits", "data.zarr/tasks/params/zarr.json", "_sessions", "tables"])
def test_a_link_that_leads_outside_is_neither_read_nor_written_through(tmp_path, train_tiny, finish, name):
    path, outside = train_tiny(tmp_path / "run", iterations=1), tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("mine")
    target = path / name
    is_folder = target.is_dir()
    os.rename(target, tmp_path / "moved")
    target.symlink_to(outside if is_folder else tmp_path / "moved")
    before = sorted(outside.iterdir())
    assert any("link" in damage.problem or "missing" in damage.problem for damage in verified(path))
    with contextlib.suppress(storage.StoreError):
        finish(path)
    assert sorted(outside.iterdir()) == before


def verified(path):
    try:
        return storage.verify_run(path)
    except storage.NotARun as error:
        return [storage.Damage("run.json", None, None, None, None, str(error))]


class Evil:
    def __reduce__(self):
        return (os.mkdir, (os.environ["EVIL"],))


@pytest.mark.parametrize(
    "place", ["run.json", "data.zarr/learner/params.float32/c.1.0", "tables/episodes/00000000.parquet"]
)
def test_a_pickle_in_any_place_is_never_loaded(tmp_path, train_tiny, monkeypatch, place):
    monkeypatch.setenv("EVIL", str(tmp_path / "evil"))
    path = train_tiny(tmp_path / "run", iterations=1)
    (path / place).write_bytes(pickle.dumps(Evil()))
    with pytest.raises(storage.StoreError):
        read_all(path)
    assert not (tmp_path / "evil").exists()


def read_all(path):
    run = storage.open_run(path)
    for ref in run.refs():
        run.load(ref)
    run.episodes()

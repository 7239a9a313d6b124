import json

import numpy as np
import pytest

from metaloom import storage
from metaloom.storage import StageRef
from metaloom.storage.format.files import render, sealed

REF = StageRef(3, "process_samples", 1)
ARRAYS = {"returns": np.array([[1.0, np.nan]], np.float32), "reward_terms.a": np.zeros(()), "mask": np.ones(3, bool)}


@pytest.fixture
def run(tmp_path):
    storage.put_in_quarantine(tmp_path, REF, message="returns are NaN", about={"task": 2}, arrays=ARRAYS)
    return tmp_path


def test_what_a_stage_failed_with_is_read_back_bit_for_bit(run):
    (entry,) = storage.read_quarantine(run)
    assert (entry.ref, entry.message, entry.about) == (REF, "returns are NaN", {"task": 2})
    assert entry.path == run / "_quarantine" / "00000003.process_samples.1"
    read = entry.arrays()
    assert read.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert (read[name].dtype, read[name].shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(read[name], array)


def test_numpy_alone_reads_the_files(run):
    folder = run / "_quarantine" / "00000003.process_samples.1"
    entries = json.loads((folder / "about.json").read_text())["arrays"]
    for n, entry in enumerate(entries):
        np.testing.assert_array_equal(np.load(folder / f"{n:03d}.npy", allow_pickle=False), ARRAYS[entry["name"]])


def test_a_second_failure_of_a_stage_replaces_the_first_and_leaves_no_remains(run):
    storage.put_in_quarantine(run, REF, message="again", about={}, arrays={})
    (entry,) = storage.read_quarantine(run)
    assert (entry.message, entry.arrays()) == ("again", {})
    assert [path.name for path in (run / "_quarantine").iterdir()] == [entry.path.name]


def test_entries_are_listed_in_the_order_of_the_stages(run):
    storage.put_in_quarantine(run, StageRef(3, "adapt", 0), message="", about={}, arrays={})
    storage.put_in_quarantine(run, StageRef(12, "adapt", 0), message="", about={}, arrays={})
    assert [entry.ref.iteration for entry in storage.read_quarantine(run)] == [3, 3, 12]
    assert [entry.ref.stage for entry in storage.read_quarantine(run)] == ["adapt", "process_samples", "adapt"]


def test_numbers_and_objects_that_json_does_not_know_become_text(tmp_path):
    about = {"reward": float("nan"), "task": np.array([1.0, np.inf]), "env": object, "seed": np.uint64(2**63), 5: None}
    storage.put_in_quarantine(tmp_path, REF, message="", about=about, arrays={})
    (entry,) = storage.read_quarantine(tmp_path)
    assert entry.about == {
        "reward": "nan",
        "task": [1.0, "inf"],
        "env": "<class 'object'>",
        "seed": 2**63,
        "5": None,
    }


def test_arrays_of_objects_are_refused_rather_than_pickled(tmp_path):
    with pytest.raises(ValueError, match="allow_pickle"):
        storage.put_in_quarantine(tmp_path, REF, message="", about={}, arrays={"x": np.array([object()])})
    assert list((tmp_path / "_quarantine").iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"no array", b"\x93NUMPY\x01\x00\x10\x00{'descr': '|O',   ", bytes(136)])
def test_a_file_that_is_not_the_array_it_should_be_is_named(run, content):
    (run / "_quarantine" / "00000003.process_samples.1" / "000.npy").write_bytes(content)
    (entry,) = storage.read_quarantine(run)
    with pytest.raises(storage.DamagedRun, match=r"000\.npy: not a float32 array of shape \[1, 2\]"):
        entry.arrays()


@pytest.mark.parametrize(
    "forged", [{"shape": [2**40]}, {"shape": [-1]}, {"dtype": "object"}, {"shape": "x"}, {"name": 5}]
)
def test_an_array_that_claims_another_form_takes_no_memory_and_runs_no_code(run, forged):
    file = run / "_quarantine" / "00000003.process_samples.1" / "about.json"
    document = json.loads(file.read_text())
    document["arrays"][0] |= forged
    file.write_bytes(render(sealed(document), indented=True))
    (entry,) = storage.read_quarantine(run)
    if "cannot be read" not in entry.message and "name" not in forged:
        with pytest.raises(storage.DamagedRun, match="not a float32 array"):
            entry.arrays()


def test_damage_of_an_entry_is_told_in_its_place(run):
    about = run / "_quarantine" / "00000003.process_samples.1" / "about.json"
    about.write_bytes(about.read_bytes().replace(b"NaN", b"fun"))
    (entry,) = storage.read_quarantine(run)
    assert "does not match its checksum" in entry.message
    assert entry.arrays() == {}


def test_a_quarantine_that_leads_out_of_the_run_is_neither_read_nor_written(tmp_path):
    elsewhere, run = tmp_path / "elsewhere", tmp_path / "run"
    elsewhere.mkdir()
    run.mkdir()
    (run / "_quarantine").symlink_to(elsewhere)
    with pytest.raises(storage.DamagedRun, match="symbolic link"):
        storage.put_in_quarantine(run, REF, message="", about={}, arrays={})
    assert list(elsewhere.iterdir()) == []
    assert storage.read_quarantine(run) == storage.read_quarantine(elsewhere) == []


def test_an_array_that_is_missing_is_named(run):
    (run / "_quarantine" / "00000003.process_samples.1" / "001.npy").unlink()
    (entry,) = storage.read_quarantine(run)
    with pytest.raises(storage.DamagedRun, match=r"001\.npy: missing; .*its folder may be deleted"):
        entry.arrays()

"""Many tiny iterations (T24, T31); `python benchmarks/soak.py` makes a hundred thousand."""

import gc
import importlib.util
import sys

import pytest

from metaloom import storage
from metaloom.storage.write import packer


@pytest.fixture(scope="module")
def soak(pytestconfig):
    spec = importlib.util.spec_from_file_location("soak", pytestconfig.rootpath / "benchmarks" / "soak.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["soak"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module.soak


@pytest.mark.slow
@pytest.mark.no_cover
def test_many_iterations_stay_as_cheap_as_the_first_and_leak_nothing(tmp_path, soak, monkeypatch):
    monkeypatch.setattr(packer, "SIZE", 15)
    monkeypatch.setattr(packer, "MARGIN", 3)
    gc.freeze()  # what other tests keep in memory is not looked through
    try:
        _, first, *_, last = soak(tmp_path / "run", iterations=120, blocks=8)  # the first block imports pyarrow
    finally:
        gc.unfreeze()
    assert last.iterations == 120
    assert last.open_files == first.open_files
    assert last.memory_mb < first.memory_mb + 8
    assert last.cpu_ms < 3 * first.cpu_ms  # a cost that grows with the run would be four times as high
    run = storage.open_run(tmp_path / "run")
    assert len(run.refs()) == 1 + 7 * 120
    assert len([*run.path.glob("_segments/*")]) == 7
    assert max(len([*folder.iterdir()]) for folder in run.path.rglob("*") if folder.is_dir()) < 42 * 8
    assert list((tmp_path / "run" / "_sessions").glob("*/*.part")) == []

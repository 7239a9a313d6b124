"""Thousands of tiny commits (T24); `python benchmarks/soak.py` makes a hundred thousand."""

import importlib.util
import sys

import pytest

from metaloom import storage


@pytest.fixture(scope="module")
def soak(pytestconfig):
    spec = importlib.util.spec_from_file_location("soak", pytestconfig.rootpath / "benchmarks" / "soak.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["soak"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module.soak


@pytest.mark.slow
@pytest.mark.no_cover
def test_thousands_of_commits_stay_as_cheap_as_the_first_and_leak_nothing(tmp_path, soak):
    first, *_, last = soak(tmp_path / "run", commits=2500, blocks=5)
    assert last.commits == 2500
    assert last.open_files == first.open_files
    assert last.memory_mb < first.memory_mb + 8  # the digests of 2,000 outputs take 1
    assert last.cpu_ms < 2 * first.cpu_ms
    assert len(storage.open_run(tmp_path / "run").refs()) == 2500
    assert list((tmp_path / "run" / "_sessions").glob("*/*.part")) == []

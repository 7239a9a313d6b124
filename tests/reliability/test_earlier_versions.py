"""Runs that version 0.1 stored, whose modules had other names, are opened, resumed, forked and replayed by this one."""

from pathlib import Path

import pytest
from archives import unpack

from metaloom import storage
from metaloom.flows.commands.fork import fork
from metaloom.flows.commands.replay import replay
from metaloom.flows.commands.train import config_of, resume
from metaloom.flows.opened import open_run
from metaloom.flows.results.class_returns import classes_of
from metaloom.flows.rollouts.workers import Backend

ARCHIVE = Path(__file__).parents[1] / "fixtures" / "runs-0.1.tar.gz"
"""Two iterations each of promp, ppo, sac and pearl, at the smallest sizes."""

RUNS = ("promp", "ppo", "sac", "pearl")


@pytest.fixture
def stored(tmp_path):
    unpack(ARCHIVE, tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", RUNS)
def test_the_configuration_keeps_its_digest(stored, name):
    run = storage.open_run(stored / name)
    assert storage.verify_run(run.path) == []
    assert {run.record(ref).config_digest for ref in run.refs()} == {config_of(run).digest()}


@pytest.mark.parametrize("name", RUNS)
def test_it_goes_on(stored, name):
    resume(stored / name, iterations=3, backend=Backend(workers=0))
    run = storage.open_run(stored / name)
    assert list(run.iterations) == [0, 1, 2]
    assert storage.verify_run(run.path) == []


@pytest.mark.parametrize("name", RUNS)
def test_it_is_replayed(stored, name):
    """Bits may differ on another processor; that every stage is computed from what is stored may not."""
    run = storage.open_run(stored / name)
    replayed = {stage.ref for stage in replay(run.path, 1)}
    assert replayed == {ref for ref in run.refs() if ref.iteration == 1}


@pytest.mark.parametrize("name", RUNS)
def test_it_is_forked(stored, name):
    fork(stored / name, 1, stored / "new")
    resume(stored / "new", backend=Backend(workers=0))
    run = storage.open_run(stored / "new")
    assert list(run.iterations) == [0, 1]
    assert storage.verify_run(run.path) == []


def test_it_has_returns_by_class_of_task_once_it_goes_on(stored):
    assert classes_of(storage.open_run(stored / "promp")) is None
    before = storage.open_run(stored / "promp").lineage()["digest"].to_pylist()
    resume(stored / "promp", iterations=3, backend=Backend(workers=0))
    run = open_run(stored / "promp")
    assert run.class_returns()["iteration"].unique().to_pylist() == [0, 1, 2]
    assert run.lineage()["digest"].to_pylist()[: len(before)] == before

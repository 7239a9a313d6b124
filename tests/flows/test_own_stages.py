"""A kind of run that is a table of one's own: an on-policy iteration with a stage more."""

import json

import numpy as np
import pytest

from metaloom import storage
from metaloom.flows import cli
from metaloom.flows.commands.replay import replay
from metaloom.flows.commands.thin import materialise, thin
from metaloom.flows.commands.train import resume, train
from metaloom.flows.graph import tables
from metaloom.flows.rollouts.workers import Backend
from metaloom.pipeline.dataflow.stage import ITERATION, Stage
from metaloom.pipeline.types import EpisodeBatch, Samples
from metaloom.stages.graphs.on_policy import ON_POLICY
from metaloom.storage import Retention, StageRef

SERIAL = Backend(workers=0)


def audit(*, episodes: tuple[EpisodeBatch, ...], samples: Samples) -> Samples:
    """Samples before adaptation, with the reward of every step in place of its value."""
    first = episodes[0]
    return Samples(first.rewards, first.rewards, np.zeros_like(first.rewards), samples.mask)


AUDIT = Stage(
    audit, ITERATION, reads={"episodes": "all_rollouts", "samples": "samples"}, group="audited", thinnable=True
)
OWN = ON_POLICY.named("own").insert(AUDIT, after="adapt")


@pytest.fixture
def trained(tmp_path, tiny_config, monkeypatch):
    monkeypatch.setenv("METALOOM_RUNS", str(tmp_path))
    monkeypatch.setitem(tables.GRAPHS, "on_policy", OWN)
    train(tiny_config(iterations=2), tmp_path / "run", backend=SERIAL)
    return tmp_path / "run"


def test_it_trains_replays_resumes_and_is_verified(trained, tiny_config):
    run = storage.open_run(trained)
    audited = run.load(StageRef(1, "audit"))
    assert np.array_equal(audited.returns, run[1].rollouts(0).rewards)
    assert [item.ref for item in run.record(StageRef(1, "audit")).inputs] == [
        *(StageRef(1, "collect_rollouts", k) for k in (0, 1)),
        StageRef(1, "process_samples"),
    ]
    assert all(outcome.identical for outcome in replay(trained))
    resume(trained, iterations=3, backend=SERIAL)
    assert run.contains(StageRef(2, "audit"))
    assert storage.verify_run(trained) == []


def test_its_arrays_are_thinned_and_come_back(trained):
    thin(trained, Retention(keep_last=1))
    run = storage.open_run(trained)
    assert run.is_thinned(StageRef(0, "audit"))
    assert StageRef(0, "audit") in set(materialise(trained))
    assert not run.is_thinned(StageRef(0, "audit"))


def test_commands_know_its_stage(trained, capsys):
    assert cli.run(["replay", "run@1", "--stage", "audit", "--json"]) == 0
    assert [outcome["stage"] for outcome in json.loads(capsys.readouterr().out)] == ["audit"]
    assert cli.run(["optimize", "run@1", "--stage", "audit"]) == 0
    assert "identical" in capsys.readouterr().out
    assert cli.run(["graph", "run"]) == 0
    assert "audit " in capsys.readouterr().out


def test_a_run_is_read_without_the_code_of_its_stages(trained, monkeypatch, capsys):
    monkeypatch.undo()
    assert storage.open_run(trained).load(StageRef(0, "audit")).mask.any()
    assert storage.verify_run(trained) == []
    assert cli.run(["show", f"{trained}@1"]) == 0
    assert "audit" in capsys.readouterr().out

import json
import shutil

import numpy as np
import pytest

import metaloom
from metaloom import storage
from metaloom.flows import cli
from metaloom.flows.commands.train import resume, train
from metaloom.flows.graph.runner import Runner
from metaloom.flows.operations.diff import _differences
from metaloom.flows.rollouts.workers import Backend
from metaloom.storage import StageRef

SERIAL = Backend(workers=0)


@pytest.fixture(scope="module")
def stored(tmp_path_factory, tiny_config):
    path = tmp_path_factory.mktemp("runs") / "run"
    train(tiny_config(iterations=2), path, backend=SERIAL)
    return path


@pytest.fixture
def other(tmp_path, tiny_config):
    def make(**changes):
        train(tiny_config(iterations=2, **changes), tmp_path / "other", backend=SERIAL)
        return tmp_path / "other"

    return make


def test_two_runs_of_one_configuration_are_equal(stored, other, capsys):
    outcome = metaloom.diff(stored, other())
    assert outcome.equal
    assert (outcome.compared, outcome.different, outcome.first) == (15, 0, None)
    assert cli.run(["diff", str(stored), str(outcome.b)]) == 0
    assert "equal: all 15 outputs that both have\n" in capsys.readouterr().out


def test_the_first_output_that_differs_is_named_with_how_much_each_array_does(stored, other):
    outcome = metaloom.diff(stored, other(algorithm={"name": "promp", "num_epochs": 3, "tasks_per_chunk": 2}))
    assert [(d.name, d.a, d.b) for d in outcome.settings] == [("algorithm.num_epochs", "2", "3")]
    assert outcome.first == StageRef(0, "meta_optimize")
    params = [difference for difference in outcome.arrays if difference.array.startswith("learner.params.")]
    a, b = (storage.open_run(path)[0].update().learner.params["log_std"] for path in (outcome.a, outcome.b))
    (log_std,) = (difference for difference in params if difference.array == "learner.params.log_std")
    assert log_std.max_abs == pytest.approx(np.abs(a.astype(float) - b).max())
    assert not outcome.equal


def test_another_seed_differs_from_the_start(stored, other):
    outcome = metaloom.diff(stored, other(seed=8))
    assert outcome.first == StageRef(0, "initialize")
    assert outcome.different == outcome.compared == 15


def test_another_code_is_told_apart_from_other_settings(stored, other, monkeypatch):
    monkeypatch.setattr("metaloom.flows.commands.train.code_digest", lambda: "other code")
    outcome = metaloom.diff(stored, other())
    assert [(d.name, d.b) for d in outcome.environment] == [("environment.code", "other code")]
    assert outcome.equal  # it explains differences and is none


def test_a_run_that_was_extended_equals_one_that_was_created_with_as_many_iterations(stored, tmp_path, tiny_config):
    train(tiny_config(iterations=1), tmp_path / "extended", backend=SERIAL)
    resume(tmp_path / "extended", iterations=2, backend=SERIAL)
    outcome = metaloom.diff(stored, tmp_path / "extended")
    assert outcome.settings == ()
    assert outcome.equal


def test_a_longer_run_differs_by_what_the_shorter_lacks(stored, tmp_path):
    shutil.copytree(stored, tmp_path / "longer")
    resume(tmp_path / "longer", iterations=3, backend=SERIAL)
    outcome = metaloom.diff(stored, tmp_path / "longer")
    assert (outcome.different, outcome.only_a, outcome.only_b) == (0, 0, 7)
    assert not outcome.equal


def test_other_code_that_changes_a_number_is_found_at_its_stage(stored, other, monkeypatch, capsys):
    right = Runner.run

    def wrong(stages, ref, inputs):
        value = right(stages, ref, inputs)
        if ref.stage == "adapt":
            value.params["log_std"][2, 1] = np.nextafter(value.params["log_std"][2, 1], np.float32(9))
        return value

    monkeypatch.setattr(Runner, "run", wrong)
    path = other()
    assert cli.run(["diff", str(stored), str(path), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["settings"], found["equal"]) == ({}, False)
    assert (found["first"]["iteration"], found["first"]["stage"], found["first"]["step"]) == (0, "adapt", 0)
    (array,) = found["first"]["arrays"]
    assert (array["array"], array["index"], array["max_ulp"], array["count"]) == ("params.log_std", [2, 1], 1, 1)
    assert cli.run(["diff", str(stored), str(path)]) == 1
    assert "first difference: iteration 0, adapt k=0" in capsys.readouterr().out


def test_settings_that_differ_are_in_the_order_of_their_names():
    names = [found.name for found in _differences(dict.fromkeys("feb", "1"), dict.fromkeys("dcab", "2"))]
    assert names == [*"abcdef"]


def test_a_folder_without_a_run_is_refused(stored, tmp_path, capsys):
    assert cli.run(["diff", str(stored), str(tmp_path)]) == 2
    assert "expected a run" in capsys.readouterr().err


def test_a_run_of_version_0_1_had_the_same_environment_and_the_defaults_of_later_settings(stored, monkeypatch):
    first, second = storage.open_run(stored), storage.open_run(stored)
    second.info = json.loads(json.dumps(second.info))
    env = second.info["environment"]["env"]
    env["class"] = env["class"].removeprefix("metaloom.")
    for section, name in (("policy", "network"), ("algorithm", "kernel"), ("env", "diagnostics")):
        del second.info["config"][section][name]
    del second.info["config"]["device"]
    assert second.info != first.info
    runs = iter([first, second])
    monkeypatch.setattr("metaloom.storage.open_run", lambda path: next(runs))
    outcome = metaloom.diff(stored, stored)
    assert (outcome.environment, outcome.settings) == ((), ())

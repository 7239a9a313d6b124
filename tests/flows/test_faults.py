"""T20, the NaN drill: a bad number in any stage is found at that stage's border, named, kept and replayable."""

import dataclasses
import io
import json
import pdb
import shlex
import sys

import numpy as np
import pytest

from metaloom import storage
from metaloom.flows import cli
from metaloom.flows.commands.replay import debug_stage, replay
from metaloom.flows.commands.train import resume, train
from metaloom.flows.graph.runner import Runner
from metaloom.flows.rollouts.workers import Backend, LocalWorkers
from metaloom.pipeline.algorithms.contract import NumericalError
from metaloom.pipeline.algorithms.maml.promp import ProMPLearner
from metaloom.stages.faults import NotFinite, StageFault
from metaloom.storage import StageRef

SERIAL = Backend(workers=0)

# Stage and inner step, the array that gets a NaN, and where.
DRILL = [
    ("initialize", 0, "learner.params.log_std", (1,)),
    ("sample_tasks", 0, "params", (2, 1)),
    ("collect_rollouts", 0, "rewards", (1, 2, 3)),
    ("process_samples", 0, "advantages", (3, 0, 9)),
    ("adapt", 0, "params.log_std", (2, 0)),
    ("collect_rollouts", 1, "behavior.mean", (0, 1, 2, 1)),
    ("process_samples", 1, "returns", (1, 1, 1)),
    ("meta_optimize", 0, "learner.params.log_std", (0,)),
]
IDS = [f"{stage}-{step}" for stage, step, *_ in DRILL]


def poisoned(value, name, index):
    """A copy of a stage's output with a NaN in one array."""
    key, _, rest = name.partition(".")
    if isinstance(value, np.ndarray):
        value = value.copy()
        value[index] = np.nan
        return value
    if isinstance(value, dict):
        return {**value, name: poisoned(value[name], "", index)}
    return dataclasses.replace(value, **{key: poisoned(getattr(value, key), rest, index)})


def inject(monkeypatch, stage, step, name, index):
    """Make a stage of iteration 0 give a NaN in the place said."""
    right = Runner.run

    def wrong(stages, ref, inputs):
        value = right(stages, ref, inputs)
        return poisoned(value, name, index) if ref == StageRef(0, stage, step) else value

    monkeypatch.setattr(Runner, "run", wrong)


@pytest.mark.parametrize(("stage", "step", "name", "index"), DRILL, ids=IDS)
def test_a_nan_in_any_stage_is_named_kept_and_replays_to_the_same_nan(
    tmp_path, tiny_config, monkeypatch, stage, step, name, index
):
    path = tmp_path / "run"
    inject(monkeypatch, stage, step, name, index)
    with pytest.raises(NotFinite) as caught:
        train(tiny_config(iterations=1), path, backend=SERIAL)
    message, ref = str(caught.value), StageRef(0, stage, step)
    assert message.startswith(f"{path}: iteration 0, {stage} k={step}: {name} holds nan at ")
    assert f"index {list(index)}" in message
    assert f"metaloom replay {path}@0 --stage {stage} --step {step} --pdb" in message

    (entry,) = storage.read_quarantine(path)
    assert (entry.ref, entry.about["run"], entry.about["array"]) == (ref, "run", name)
    assert entry.about["index"] == list(index)
    assert np.isnan(entry.arrays()[name][index])
    run = storage.open_run(path)
    assert not run.contains(ref)
    assert storage.verify_run(path) == []

    again = debug_stage(path, 0, stage, step, debugger=pdb.Pdb(stdin=io.StringIO("quit\n"), stdout=io.StringIO()))
    assert isinstance(again.fault, NotFinite)
    assert again.fault.about["index"] == list(index)
    for kept, found in zip(entry.arrays().values(), again.fault.arrays.values(), strict=True):
        assert kept.tobytes() == found.tobytes()


def test_a_run_goes_on_where_it_failed_once_the_cause_is_gone(tmp_path, tiny_config, monkeypatch, digests):
    inject(monkeypatch, "process_samples", 1, "returns", (0, 0, 0))
    with pytest.raises(NotFinite):
        train(tiny_config(), tmp_path / "run", backend=SERIAL)
    monkeypatch.undo()
    resume(tmp_path / "run", backend=SERIAL)
    train(tiny_config(), tmp_path / "other", backend=SERIAL)
    assert digests(tmp_path / "run") == digests(tmp_path / "other")


@pytest.fixture
def diverged(tmp_path, tiny_config):
    """A run whose first adaptation overflows, without anything patched."""
    algorithm = {"name": "promp", "inner_lr": 1e40}
    with pytest.raises((NotFinite, NumericalError)) as caught:
        train(tiny_config(algorithm=algorithm, iterations=1), tmp_path / "run", backend=SERIAL)
    return tmp_path / "run", caught.value


def test_the_command_in_the_error_leads_to_the_fault_with_the_inputs_loaded(diverged, monkeypatch, capsys):
    _, error = diverged
    command = str(error).rpartition("debugger: ")[2]
    script = "p sorted(stage_inputs)\nup\np stage_inputs['samples'].returns.shape\nquit\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(script))
    assert cli.run(shlex.split(command)[1:]) == 1
    printed = capsys.readouterr().out
    assert "`stage_inputs` holds state, params, episodes, samples; `up` moves to the stage" in printed
    assert "['episodes', 'params', 'samples', 'state']" in printed
    assert "(4, 3, 10)" in printed
    assert "failed: " in printed


def test_numerical_errors_inside_a_stage_are_kept_too_and_keep_their_type(tmp_path, tiny_config, monkeypatch):
    right = Runner.run

    def fail(stages, ref, inputs):
        if ref.stage == "adapt":
            raise NumericalError("the gradient of task 3 holds nan")
        return right(stages, ref, inputs)

    monkeypatch.setattr(Runner, "run", fail)
    with pytest.raises(
        NumericalError, match=r"the gradient of task 3 holds nan\. The message and arrays of the failure are kept in"
    ):
        train(tiny_config(), tmp_path / "run", backend=SERIAL)
    (entry,) = storage.read_quarantine(tmp_path / "run")
    assert entry.about == {"run": "run", "iteration": 0, "stage": "adapt", "step": 0, "seed_position": [7, 0, 0]}


def test_what_a_fault_carries_is_kept_with_it(tmp_path, tiny_config, monkeypatch):
    def fail(*arguments, **options):
        raise StageFault("the robot fell apart", {"task": 1, "episode": 2, "seed": 5}, {"actions": np.arange(6.0)})

    monkeypatch.setattr(LocalWorkers, "collect", fail)
    with pytest.raises(StageFault, match="fell apart"):
        train(tiny_config(), tmp_path / "run", backend=SERIAL)
    (entry,) = storage.read_quarantine(tmp_path / "run")
    assert (entry.about["task"], entry.about["episode"], entry.about["seed"]) == (1, 2, 5)
    np.testing.assert_array_equal(entry.arrays()["actions"], np.arange(6.0))


def test_a_fault_that_cannot_be_kept_is_still_told(tmp_path, tiny_config, monkeypatch):
    inject(monkeypatch, "adapt", 0, "params.log_std", (0, 0))

    def full(*arguments, **options):
        raise storage.StorageFailed("run", found="no space", required="space", action="Free some")

    monkeypatch.setattr(storage, "put_in_quarantine", full)
    with pytest.raises(NotFinite, match=r"holds nan .* could not be stored \(run: no space"):
        train(tiny_config(), tmp_path / "run", backend=SERIAL)


def test_replaying_a_stage_checks_its_numbers_as_training_does(tmp_path, tiny_config, monkeypatch):
    train(tiny_config(iterations=1), tmp_path / "run", backend=SERIAL)
    inject(monkeypatch, "process_samples", 0, "returns", (0, 1, 2))
    with pytest.raises(
        NotFinite, match=r"run: iteration 0, process_samples k=0: returns holds nan at task 0, episode 1"
    ):
        list(replay(tmp_path / "run"))
    assert storage.read_quarantine(tmp_path / "run") == []


def test_a_stage_that_does_not_fail_says_so_and_whether_it_gave_the_stored_bits(tmp_path, tiny_config, capsys):
    train(tiny_config(iterations=1), tmp_path / "run", backend=SERIAL)
    command = ["replay", f"{tmp_path / 'run'}@0", "--stage", "adapt", "--pdb"]
    assert cli.run(command) == 0
    assert "adapt k=0 did not fail; identical to what is stored" in capsys.readouterr().out
    (tmp_path / "run" / "_commits" / StageRef(0, "adapt").file_name).unlink()
    assert cli.run(command) == 0
    assert "nothing is stored to compare with" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--stage", "adapt", "--until-diff"], "--until-diff cannot be combined with --pdb"),
        (["--stage", "adapt", "--workers", "2"], "--workers cannot be combined with --pdb"),
        ([], "--pdb requires one stage"),
        (["--stage", "rollout"], "its stages are initialize, sample_tasks"),
        (["--stage", "adapt", "--step", "3"], "must be one of 0"),
    ],
)
def test_the_debugger_takes_exactly_one_stage_in_this_process(tmp_path, tiny_config, capsys, options, message):
    train(tiny_config(iterations=1), tmp_path / "run", backend=SERIAL)
    assert cli.run(["replay", f"{tmp_path / 'run'}@0", "--pdb", *options]) == 2
    assert message in capsys.readouterr().err


def test_show_lists_what_is_in_quarantine(diverged, capsys):
    path, _ = diverged
    assert cli.run(["show", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "quarantine" in printed
    assert "adapt k=0" in printed
    assert cli.run(["show", str(path), "--json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)["quarantine"]
    assert entry["path"] == str(path / "_quarantine" / "00000000.adapt.0")
    assert not entry["stored_since"]


def test_a_stage_that_writes_into_its_inputs_is_stopped_before_they_reach_the_disk_changed(
    tmp_path, tiny_config, monkeypatch
):
    def halved(self, state, episodes, *, seed, parallel=map):
        episodes.rewards[...] *= 0.5
        return process(self, state, episodes, seed=seed, parallel=parallel)

    process = ProMPLearner.process
    monkeypatch.setattr(ProMPLearner, "process", halved)
    with pytest.raises(ValueError, match="read-only") as caught:
        train(tiny_config(), tmp_path / "run", backend=SERIAL)
    (place,) = caught.value.__notes__
    assert "in iteration 0, process_samples k=0. To look at it in a debugger: metaloom replay" in place
    monkeypatch.undo()
    assert not storage.verify_run(tmp_path / "run")
    resume(tmp_path / "run", backend=SERIAL)
    assert all(outcome.identical for outcome in replay(tmp_path / "run"))


def test_a_plug_in_that_exits_does_not_end_the_program_as_if_it_were_done(tmp_path, tiny_config, monkeypatch):
    monkeypatch.setattr(ProMPLearner, "update", lambda *_, **__: sys.exit(0))
    with pytest.raises(StageFault, match=r"iteration 0, meta_optimize k=0: the stage asked Python to exit \(0\)"):
        train(tiny_config(), tmp_path / "run", backend=SERIAL)

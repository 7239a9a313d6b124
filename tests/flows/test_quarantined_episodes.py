"""`metaloom replay RUN@I --quarantine`: the episode again that an environment failed in, and nothing else."""

import io
import pdb
from pathlib import Path

import numpy as np
import pytest

from metaloom import storage
from metaloom.flows.cli import run as command
from metaloom.flows.commands.replay import reproduce_kept
from metaloom.flows.commands.train import resume, train
from metaloom.flows.rollouts.workers import Backend
from metaloom.stages.rollouts.faults import RolloutError
from metaloom.storage import StageRef

HERE = Backend(workers=0)


@pytest.fixture
def failed(tiny_config, tmp_path, monkeypatch):
    """Makes a run whose environment failed while the file `now` was there."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "hostile"))
    monkeypatch.setenv("METALOOM_RUNS", str(tmp_path))

    def build(fault="raise", present=True, **changes):
        options = {"fault": fault, "only_if": str(tmp_path / "now")}
        config = tiny_config(
            env={"name": "hostile_envs:Hostile", "options": options},
            **{"num_tasks": 2, "episodes_per_task": 2, "max_episode_steps": 5, **changes},
        )
        if present:
            (tmp_path / "now").touch()
        with pytest.raises(RolloutError) as caught:
            train(config, tmp_path / "run", backend=HERE)
        return str(caught.value)

    return build


def test_a_kept_episode_fails_again_with_the_same_error_until_the_environment_is_mended(failed, tmp_path, capsys):
    message = failed()
    words = "iteration 0, collect_rollouts k=0: hostile_envs:Hostile, task 0 "
    assert words in message
    again = f"metaloom replay {tmp_path / 'run'}@0 --stage collect_rollouts --step 0 --quarantine"
    assert message.endswith(f"{again}. To look at it in a debugger, add --pdb")
    for _ in range(2):
        assert command(again.split()[1:]) == 1
        error = capsys.readouterr().err
        assert error.startswith(f"metaloom: {words}")
        assert "step 2: Hostile.step raised ValueError: my own bug" in error
    (tmp_path / "now").unlink()
    assert command(["replay", "run@0", "--quarantine"]) == 0
    out = capsys.readouterr().out
    assert "completed without a failure this time. The stored failure:" in out
    assert "my own bug" in out
    assert resume(tmp_path / "run", backend=HERE).iterations_done == 3


def test_the_debugger_starts_where_the_environment_fails(failed, tmp_path):
    failed()
    said = io.StringIO()
    debugger = pdb.Pdb(stdin=io.StringIO("p self.t, self.fault\nq\n"), stdout=said, readrc=False)
    with pytest.raises(RolloutError, match="my own bug"):
        reproduce_kept(tmp_path / "run", 0, debugger=debugger)
    assert "(3, 'raise')" in said.getvalue()


def test_a_fault_in_an_evaluation_says_so_and_is_reproduced(failed, tmp_path, capsys):
    evaluation = {"every": 1, "num_tasks": 2, "adaptation_steps": 1, "test_episodes": 2}
    original = storage.RunWriter.put

    def put(writer, ref, *arguments, **options):
        original(writer, ref, *arguments, **options)
        if ref.stage == "meta_optimize":
            (tmp_path / "now").touch()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage.RunWriter, "put", put)
        message = failed(evaluation=evaluation, present=False)
    words = "evaluate, test episodes after 0 adaptation steps: hostile_envs:Hostile, task 0 "
    assert words in message
    assert "--stage evaluate --step 0 --quarantine" in message
    assert command(["replay", "run@0", "--quarantine"]) == 1
    assert capsys.readouterr().err.startswith(f"metaloom: {words}")


def test_what_cannot_be_run_again_is_refused_with_what_there_is(failed, tmp_path, capsys):
    failed()
    run = tmp_path / "run"
    cases = {
        (
            "run@1",
            "--quarantine",
        ): "the quarantine has 0 matching failures of iteration 1; expected exactly one",
        ("run@0", "--quarantine", "--step", "1"): "it contains --stage collect_rollouts --step 0",
        ("run", "--quarantine"): "--quarantine requires one iteration",
        ("run@0", "--quarantine", "--materialise"): "--materialise cannot be combined with --quarantine",
        ("run@0", "--quarantine", "--workers", "1"): "--workers cannot be combined with --quarantine",
        ("run@0", "--quarantine", "--retries", "1"): "use --workers 1 or more",
        ("run@0", "--pdb", "--stage", "adapt", "--workers", "1"): "--workers cannot be combined with --pdb",
    }
    for arguments, words in cases.items():
        assert command(["replay", *arguments]) == 2, arguments
        assert words in capsys.readouterr().err
    storage.put_in_quarantine(
        run, StageRef(0, "process_samples"), message="advantages holds nan", about={}, arrays={"a": np.zeros(1)}
    )
    assert command(["replay", "run@0", "--quarantine"]) == 2
    assert "the quarantine has 2 matching failures of iteration 0" in capsys.readouterr().err
    assert command(["replay", "run@0", "--quarantine", "--stage", "process_samples"]) == 2
    assert "--stage process_samples --step 0 --pdb" in capsys.readouterr().err

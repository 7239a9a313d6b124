"""`metaloom show --stage sample_transitions` prints what a gradient step learned from, and where each row is from."""

import json

import numpy as np
import pytest

from metaloom import storage
from metaloom.flows import cli
from metaloom.pipeline.types import EpisodeBatch, LearnerState, Minibatches, TaskBatch, Update
from metaloom.storage import Span, StageRef
from metaloom.storage.format.stages import OFF_POLICY

LENGTHS = np.array([[2, 3]], np.int32)


def episodes(first: float) -> EpisodeBatch:
    """Two episodes of one task, of 2 and 3 steps; observations count on from a number, rewards are their negatives."""
    observations = first + np.arange(8, dtype=np.float32).reshape(1, 2, 4, 1)
    return EpisodeBatch(
        observations=np.repeat(observations, 8, axis=3),
        actions=observations[:, :, :3] / 10,
        rewards=-observations[:, :, :3, 0],
        terminated=np.array([[True, False]]),
        truncated=np.array([[False, True]]),
        lengths=LENGTHS,
        behavior={},
        reward_terms={},
        initial_state=np.zeros((1, 2, 0)),
    )


@pytest.fixture
def run(tmp_path, monkeypatch):
    """One iteration: rows 0 to 4 fill the memory, rows 5 to 9 are its own."""
    monkeypatch.setenv("METALOOM_RUNS", str(tmp_path))
    learner = LearnerState({"w": np.zeros(2, np.float32)})
    context = np.array([[[9]], [[-1]]])
    outputs = [
        (StageRef(0, "initialize"), Update(learner, {})),
        (StageRef(0, "fill_memory"), episodes(0)),
        (StageRef(0, "sample_tasks"), TaskBatch(np.zeros((1, 0)), np.array([4]))),
        (StageRef(0, "collect_rollouts"), episodes(100)),
        (
            StageRef(0, "sample_transitions"),
            Minibatches(np.array([[[1, 7, 4]], [[-1, -1, -1]]]), np.array([[4], [-1]]), context),
        ),
        (StageRef(0, "update"), Update(learner, {"loss": 1.0})),
    ]
    about = {"config": {}, "config_digest": "", "environment": {}}
    with storage.create_run(tmp_path / "run", capacity=1, stages=OFF_POLICY, **about) as writer:
        for ref, value in outputs:
            inputs = [Span(("fill_memory", "collect_rollouts"), 0, 0)] if ref.stage == "update" else []
            writer.put(ref, value, inputs=inputs, seed_position=(0,), started=0.0, seconds=0.0)
    return tmp_path / "run"


def show(capsys, *words: str) -> str:
    assert cli.run(["show", *words]) == 0
    return capsys.readouterr().out


STAGE = ("run@0", "--stage", "sample_transitions")


def test_rows_are_shown_with_where_they_are_from_and_what_they_are(run, capsys):
    info = json.loads(show(capsys, *STAGE, "--json"))
    assert (info["iteration"], info["update"], info["num_updates"], info["tasks"]) == (0, 0, 1, [4])
    fill, own, cut = info["transitions"]
    # Row 1 is the last of the fill's first episode, row 7 the first of the second episode that was collected.
    assert fill == {
        "place": 0,
        "memory": 4,
        "n": 0,
        "row": 1,
        "iteration": 0,
        "stage": "fill_memory",
        "step": 0,
        "task": 0,
        "task_id": None,
        "episode": 0,
        "t": 1,
        "observation": [1.0] * 8,
        "action": [pytest.approx(0.1)],
        "reward": -1.0,
        "next_observation": [2.0] * 8,
        "terminated": True,
    }
    assert (own["stage"], own["task_id"], own["episode"], own["t"]) == ("collect_rollouts", 4, 1, 0)
    assert (own["observation"][0], own["next_observation"][0], own["terminated"]) == (104.0, 105.0, False)
    assert (cut["row"], cut["terminated"]) == (4, False)  # a time limit ended that episode


def test_the_table_shows_the_chosen_rows(run, capsys):
    text = show(capsys, *STAGE, "--rows", "1:2")
    assert "iteration 0, minibatch of gradient step 0 of 1: 1 x 3 transitions" in text
    assert "1 of 3 transitions" in text
    (line,) = [line for line in text.splitlines() if "collect_rollouts k=0" in line]
    assert line.split()[:3] == ["4", "7", "0"]
    assert "104, 104, 104, 104, ... (8)" in line
    assert "fill_memory" not in text
    for chosen, rows in (("0", [1]), ("1", [7]), ("-1", [4]), ("-2", [7]), (":", [1, 7, 4])):
        info = json.loads(show(capsys, *STAGE, f"--rows={chosen}", "--json"))
        assert [transition["row"] for transition in info["transitions"]] == rows


def test_the_context_is_shown_instead_if_it_is_asked_for(run, capsys):
    info = json.loads(show(capsys, *STAGE, "--context", "--json"))
    assert [row["row"] for row in info["transitions"]] == [9]
    assert "context of gradient step 0 of 1" in show(capsys, *STAGE, "--context")


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("run", "--stage", "sample_transitions"), 2, "one iteration, such as run@0"),
        (("run@0", "--update", "1"), 2, "--update requires --stage sample_transitions"),
        (("run@0", "--rows", "1:2"), 2, "--rows requires --stage"),
        (("run@0", "--context"), 2, "--context requires --stage"),
        ((*STAGE, "--rows", "a"), 2, "--rows a: expected N or FROM:TO"),
        ((*STAGE, "--update", "1"), 1, "no gradient step 1; expected a step from 0 to 0"),
    ],
)
def test_what_cannot_be_shown_is_explained(run, capsys, words, code, said):
    assert cli.run(["show", *words]) == code
    assert said in capsys.readouterr().err


def test_the_iteration_itself_lists_the_stages_of_an_off_policy_run(run, capsys):
    text = show(capsys, "run@0")
    for stage in ("fill_memory", "sample_transitions", "update"):
        assert stage in text
    assert "not complete" not in text
    assert "all fill_memory and collect_rollouts i=0-0 (2 outputs with 10 steps)" in " ".join(text.split())
    info = json.loads(show(capsys, "run@0", "--json"))
    (span,) = info["stages"][-1]["spans"]
    assert (span["last"]["stage"], span["outputs"], span["steps"]) == ("collect_rollouts", 2, 10)

"""`metaloom fork`: another continuation of a stored run, which is a run like any other."""

import shutil
import sys

import numpy as np
import pyarrow.parquet as pq
import pytest

import metaloom
from metaloom import storage
from metaloom.flows.cli import run as command
from metaloom.flows.commands.fork import _list, fork
from metaloom.flows.commands.replay import replay
from metaloom.flows.commands.thin import thin
from metaloom.flows.commands.train import resume, train
from metaloom.flows.rollouts.workers import Backend
from metaloom.flows.views.history import load_history
from metaloom.pipeline.config.input import ConfigError
from metaloom.storage import StageRef

SERIAL = Backend(workers=0)


@pytest.fixture
def parent(tmp_path, copy_tiny_run, monkeypatch):
    monkeypatch.setenv("METALOOM_RUNS", str(tmp_path))
    return copy_tiny_run(tmp_path / "parent")


def test_a_fork_without_changes_goes_on_as_the_parent_did(parent, tmp_path, digests):
    fork(parent, 1, tmp_path / "same")
    resume(tmp_path / "same", backend=SERIAL)
    assert digests(tmp_path / "same") == digests(parent)
    assert storage.verify_run(tmp_path / "same") == []


def test_a_fork_differs_from_its_parent_from_the_fork_on_and_replays_under_the_settings_of_both(
    parent, tmp_path, digests
):
    fork(parent, 2, tmp_path / "child", ["algorithm.clip_eps=0.01", "iterations=4"])
    resume(tmp_path / "child", backend=SERIAL)
    before, after = digests(parent), digests(tmp_path / "child")
    same = {name for name in before if after[name] == before[name]}
    assert {name for name in before if not name.startswith("2.")} <= same
    assert "2.meta_optimize.0" not in same
    run = storage.open_run(tmp_path / "child")
    assert len(run.iterations) == 4
    assert run.metrics()["clip_eps"].to_pylist() == pytest.approx([0.3, 0.3, 0.01, 0.01])
    shutil.rmtree(parent)
    assert all(outcome.identical for outcome in replay(tmp_path / "child"))


def test_settings_that_do_not_change_the_form_of_a_batch_can_change(parent, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "metaloom.flows.rollouts.dask", None)  # a fork starts no workers
    changes = ["seed=9", "processing.discount=0.9", "env.action_scale=0.5", "algorithm.outer_lr=0.1"]
    fork(parent, 1, tmp_path / "child", changes)
    assert resume(tmp_path / "child", backend=SERIAL).iterations_done == 3
    info = storage.open_run(tmp_path / "child").info
    assert {*info["parent"]["changes"]} == {change.partition("=")[0] for change in changes}
    assert storage.verify_run(tmp_path / "child") == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("num_tasks=5", "num_tasks cannot change from 4 to 5: array shapes are fixed within a run"),
        ("max_episode_steps=11", "max_episode_steps cannot change"),
        ("algorithm.inner_steps=2", "adaptation steps cannot change from 1 to 2"),
        ("policy.hidden_sizes=[8]", "the learner of the parent would lose .* and 2 more and gain nothing under these"),
        (
            "policy.hidden_sizes=[8, 8, 8]",
            "the learner of the parent would lose nothing and gain .* and 2 more under these",
        ),
        ("policy.hidden_sizes=[8, 9]", r"hidden_1.bias is float32\[8\] in the parent and float32\[9\]"),
        ("env.options.reward=sparse", "env: the reward terms cannot change"),
        ("env=half-cheetah-dir", "env: the size of an observation cannot change"),
        ("algorithm=maml-trpo", "the learner of the parent would lose .*optimizer.first_moment"),
        ("algorithm=dice-maml", "cannot update from the batches|would lose"),
        ("iterations=1", "iterations must be at least 2, where the fork begins, got 1"),
        ("algorithm.clip=1", "unknown key"),
    ],
)
def test_settings_under_which_the_run_could_not_go_on_are_refused_with_the_reason(parent, tmp_path, change, reason):
    with pytest.raises(ConfigError, match=reason):
        fork(parent, 2, tmp_path / "child", [change, "processing.name=dice"] if "dice" in change else [change])
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["parent"]


@pytest.mark.parametrize(
    ("names", "told"),
    [("", "nothing"), ("a", "a"), ("abcd", "a, b, c, d"), ("abcde", "a, b, c, d and 1 more")],
)
def test_of_what_would_be_lost_or_gained_four_names_are_told(names, told):
    assert _list(names) == told


def test_a_fork_may_have_no_more_iterations_than_its_parent_has_given_it(parent, tmp_path):
    fork(parent, 2, tmp_path / "child", ["iterations=2"])
    assert len(storage.open_run(tmp_path / "child").iterations) == 2


def test_another_algorithm_can_go_on_where_learner_and_metrics_fit(tmp_path, tiny_config):
    train(tiny_config(algorithm={"name": "maml-trpo", "tasks_per_chunk": 2}), tmp_path / "trpo", backend=SERIAL)
    fork(tmp_path / "trpo", 1, tmp_path / "child", ["algorithm=e-maml"])
    assert resume(tmp_path / "child", backend=SERIAL).iterations_done == 3
    assert storage.verify_run(tmp_path / "child") == []


def test_a_fork_may_lose_metrics_of_its_parent_and_gain_others(tmp_path, tiny_config, digests):
    train(tiny_config(algorithm={"name": "maml-vpg", "tasks_per_chunk": 2}), tmp_path / "vpg", backend=SERIAL)
    falling = ["algorithm.lr_schedule=exponential", "algorithm.lr_decay=0.9"]
    fork(tmp_path / "vpg", 1, tmp_path / "ppo", ["algorithm=maml-ppo", *falling])
    resume(tmp_path / "ppo", iterations=3, backend=SERIAL)
    constant = ["algorithm.lr_schedule=constant", "algorithm.lr_decay=1", "algorithm.max_grad_norm=1"]
    fork(tmp_path / "ppo", 2, tmp_path / "again", [*constant, "iterations=4"])
    resume(tmp_path / "again", backend=SERIAL)
    run, parent = storage.open_run(tmp_path / "again"), storage.open_run(tmp_path / "vpg")
    names = [{*run[i].metrics()} for i in run.iterations]
    assert run.metrics(slice(0, 1)).column_names == run.metrics().column_names == run.metrics(()).column_names
    assert names[0] == {*parent[0].metrics()}
    assert names[2] == names[3] == names[1] - {"outer_lr"} | {"largest_gradient_norm"}
    assert (names[1] - names[0], names[0] - names[1]) == ({"clip_fraction", "outer_lr"}, set())
    for name in {*run.metrics().column_names} - {"iteration"}:
        held = [run[i].metrics().get(name) for i in run.iterations]
        assert run.metrics()[name].to_pylist() == held
    assert storage.verify_run(tmp_path / "again") == []
    assert all(outcome.identical for i in run.iterations for outcome in replay(tmp_path / "again", i))
    before, table = digests(tmp_path / "again"), run.metrics()
    with storage.open_writer(tmp_path / "again") as writer:
        assert writer.pack() == [range(1), range(1, 2), range(2, 3)]
    packed = storage.open_run(tmp_path / "again")
    assert (digests(tmp_path / "again"), packed.metrics()) == (before, table)
    assert storage.verify_run(tmp_path / "again") == []
    metaloom.export(tmp_path / "again", to="parquet", out=tmp_path / "exported")
    written = pq.read_table(tmp_path / "exported" / "metrics.parquet")
    assert written.equals(table)
    assert np.isnan(load_history(packed).metrics["largest_gradient_norm"]).tolist() == [True, True, False, False]


def test_a_run_of_the_first_format_keeps_its_metrics_in_forks(tmp_path, tiny_config, monkeypatch):
    monkeypatch.setattr("metaloom.storage.write.creation.FORMAT", "metaloom/1")
    train(tiny_config(), tmp_path / "old", backend=SERIAL)
    with pytest.raises(storage.IncompatibleFormat, match="change the metrics of a run of format metaloom/1"):
        fork(tmp_path / "old", 1, tmp_path / "child", ["algorithm.max_grad_norm=1"])
    assert not (tmp_path / "child").exists()


def test_before_the_first_iteration_even_sizes_can_change(parent, tmp_path):
    fork(parent, 0, tmp_path / "child", ["num_tasks=2", "max_episode_steps=4"])
    resume(tmp_path / "child", backend=SERIAL)
    run = storage.open_run(tmp_path / "child")
    assert len(run[2].tasks()) == 2
    learner = StageRef(0, "initialize")
    assert run.record(learner).digest == storage.open_run(parent).record(learner).digest


def test_the_command_tells_what_is_shared_and_how_to_go_on(parent, tmp_path, capsys):
    assert command(["fork", "parent@2", "--run", "child", "--set", "algorithm.clip_eps=0.1"]) == 0
    out = capsys.readouterr().out
    assert "2 iterations" in out
    assert f"metaloom resume {tmp_path / 'child'}" in out
    assert "copied" not in out
    assert command(["resume", "child", "--workers", "0"]) == 0
    capsys.readouterr()
    assert command(["show", "child"]) == 0
    assert "parent@2" in capsys.readouterr().out
    assert command(["fork", "parent@4", "--run", "other"]) == 1
    assert "3 iterations are complete" in capsys.readouterr().err
    assert command(["fork", "parent@2", "--run", "child"]) == 2


def test_a_fork_may_begin_before_its_parent_does(parent, tmp_path, digests):
    fork(parent, 2, tmp_path / "child", ["algorithm.clip_eps=0.01"])
    resume(tmp_path / "child", backend=SERIAL)
    fork(tmp_path / "child", 1, tmp_path / "early")
    resume(tmp_path / "early", backend=SERIAL)
    fork(tmp_path / "early", 2, tmp_path / "last", ["algorithm.clip_eps=0.2", "iterations=4"])
    resume(tmp_path / "last", backend=SERIAL)
    for name in ("early", "last"):
        assert storage.verify_run(tmp_path / name) == []
        assert all(outcome.identical for outcome in replay(tmp_path / name))
    clips = [storage.open_run(tmp_path / name).metrics()["clip_eps"].to_pylist() for name in ("early", "last")]
    assert clips[0] == pytest.approx([0.3, 0.01, 0.01])
    assert clips[1] == pytest.approx([0.3, 0.01, 0.2, 0.2])


def test_what_is_damaged_of_the_shared_iterations_is_computed_again_under_the_parents_settings(
    parent, tmp_path, digests
):
    child = tmp_path / "child"
    fork(parent, 2, child, ["algorithm.clip_eps=0.01", "algorithm.inner_lr=0.2"])
    resume(child, backend=SERIAL)
    before = digests(child)
    run = storage.open_run(child)
    for ref in (StageRef(1, "adapt"), StageRef(0, "meta_optimize")):
        file = child / next(chunk.path for chunk in run.record(ref).chunks if chunk.size)
        file.unlink()  # which leaves the parent's
        file.write_bytes(b"other")
    resume(child, repair=True, backend=SERIAL)
    assert digests(child) == before
    assert storage.verify_run(child) == []
    assert all(outcome.identical for outcome in replay(child))
    run, parents = storage.open_run(child), storage.open_run(parent)
    for ref in run.refs():
        own = ref.iteration == 2
        assert run.record(ref).config_digest == (run if own else parents).info["config_digest"], ref


def test_an_iteration_that_was_thinned_can_be_forked_under_another_algorithm(parent, tmp_path):
    thin(parent, storage.Retention(keep_last=1))
    fork(parent, 2, tmp_path / "child", ["algorithm.clip_eps=0.01"])
    assert resume(tmp_path / "child", backend=SERIAL).iterations_done == 3
    run = storage.open_run(tmp_path / "child")
    assert run.thinned_iterations() == [0, 1]
    assert all(outcome.identical for outcome in replay(tmp_path / "child"))


EVALUATION = {"every": 1, "num_tasks": 2, "adaptation_steps": 1, "episodes": 2, "test_episodes": 2, "seed": 1}


def test_shared_evaluations_are_replayed_as_the_parent_made_them(tmp_path, tiny_config):
    train(tiny_config(evaluation=EVALUATION), tmp_path / "parent", backend=SERIAL)
    fork(tmp_path / "parent", 2, tmp_path / "child", ["evaluation.seed=2", "evaluation.deterministic=true"])
    resume(tmp_path / "child", backend=SERIAL)
    assert storage.verify_run(tmp_path / "child") == []
    outcomes = list(replay(tmp_path / "child", stage="evaluate"))
    assert [outcome.identical for outcome in outcomes] == [True] * 3


def test_every_second_iterations_evaluation_can_be_replayed_by_name(tmp_path, tiny_config):
    train(tiny_config(evaluation={**EVALUATION, "every": 2}), tmp_path / "run", backend=SERIAL)
    assert [outcome.ref.iteration for outcome in replay(tmp_path / "run", stage="evaluate")] == [1]


@pytest.mark.parametrize("change", ["num_tasks=3", "adaptation_steps=0", "episodes=3", "test_episodes=5"])
def test_evaluations_of_another_size_cannot_be_stored_behind_those_of_the_parent(tmp_path, tiny_config, change):
    train(tiny_config(evaluation=EVALUATION, iterations=1), tmp_path / "parent", backend=SERIAL)
    with pytest.raises(ConfigError, match=r"evaluation: .* cannot change from"):
        fork(tmp_path / "parent", 1, tmp_path / "child", [f"evaluation.{change}", "iterations=2"])
    fork(tmp_path / "parent", 1, tmp_path / "child", [f"evaluation.{change}", "evaluation.every=null", "iterations=2"])
    fork(tmp_path / "parent", 0, tmp_path / "early", [f"evaluation.{change}"])
    assert resume(tmp_path / "early", backend=SERIAL).iterations_done == 1
    if change == "adaptation_steps=0":
        fork(
            tmp_path / "early", 1, tmp_path / "later", ["evaluation.episodes=3", "iterations=2"]
        )  # which are not played

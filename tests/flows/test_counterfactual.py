import json
import sys

import numpy as np
import pytest

from metaloom import storage
from metaloom.flows import cli
from metaloom.flows.commands.optimize import optimize, sweep
from metaloom.flows.commands.train import train
from metaloom.flows.errors import UsageError
from metaloom.flows.graph.runner import Runner
from metaloom.flows.results.counterfactual import Counterfactual, Outcome
from metaloom.flows.rollouts.workers import Backend, LocalWorkers
from metaloom.flows.sweeps.space import parse_grid
from metaloom.pipeline.config.input import ConfigError
from metaloom.pipeline.types import Samples
from metaloom.storage import StageMissing, StageRef

SERIAL = Backend(workers=0)


@pytest.fixture(scope="module")
def stored(tmp_path_factory, tiny_config):
    path = tmp_path_factory.mktemp("runs") / "run"
    train(tiny_config(iterations=2), path, backend=SERIAL)
    return path


@pytest.fixture(autouse=True)
def no_sampling(request, monkeypatch):
    if "stored" in request.fixturenames:
        request.getfixturevalue("stored")
    monkeypatch.setattr(LocalWorkers, "collect", lambda *_: pytest.fail("it sampled"))


@pytest.mark.parametrize(
    ("stage", "step"),
    [("meta_optimize", 0), ("adapt", 0), ("process_samples", 0), ("process_samples", 1), ("sample_tasks", 0)],
)
def test_with_settings_unchanged_every_stage_gives_the_stored_bits(stored, stage, step):
    result = optimize(stored, 1, stage=stage, step=step)
    assert result.stored.identical
    assert result.changed.identical
    assert result.distance()["distance"] == 0
    assert "config=" not in repr(result.changed)
    assert "digests=" not in repr(result.changed)


def test_a_stage_that_ends_no_iteration_leads_to_no_learner(stored):
    with pytest.raises(UsageError, match="a Samples has no learner; use the stage that ends an iteration"):
        _ = optimize(stored, 1, stage="process_samples").changed.learner


def test_naming_the_settings_that_the_run_has_changes_nothing(stored):
    assert optimize(stored, 1, ["algorithm.clip_eps=0.3", "processing.discount=0.99"]).changed.identical


def test_both_learners_come_back_and_the_changed_one_took_another_step(stored):
    result = optimize(stored, 1, ["algorithm.outer_lr=0.01"])
    run = storage.open_run(stored)
    before, after = run[1].learner().params, run[1].update().learner
    assert storage.digest(result.stored.learner) == storage.digest(after)
    # Adam's first steps are proportional to its step size, so ten times the rate goes about ten times as far.
    lengths = result.quantities()["step_length"]
    assert lengths[1] == pytest.approx(10 * lengths[0], rel=0.5)
    a, b = (
        np.concatenate([(learner.params[n].astype(float) - before[n]).ravel() for n in before])
        for learner in (after, result.changed.learner)
    )
    distance = {"distance": np.linalg.norm(b - a), "max_distance": np.abs(b - a).max()}
    cosine = a @ b / np.linalg.norm(a) / np.linalg.norm(b)
    assert result.distance() == pytest.approx({**distance, "step_cosine": cosine})
    assert 0 < cosine < 1


def test_the_run_is_left_as_it_was(stored):
    files = {file: file.stat().st_mtime_ns for file in stored.rglob("*")}
    optimize(stored, 0, ["algorithm.clip_eps=0.01"])
    assert {file: file.stat().st_mtime_ns for file in stored.rglob("*")} == files


def test_loss_gradient_kls_and_time_stand_side_by_side(stored):
    quantities = optimize(stored, 1, ["algorithm.clip_eps=0.01"]).quantities()
    assert {"loss_before", "loss_after", "inner_kl", "outer_kl", "meta_gradient_norm", "step_length", "seconds"} <= set(
        quantities
    )
    stored_eps, changed_eps = quantities["clip_eps"]
    assert (stored_eps, changed_eps) == (0.3, 0.01)
    assert quantities["meta_gradient_norm"][0] == quantities["meta_gradient_norm"][1]  # nothing is clipped at the start
    assert not any(name.startswith("step_0.") for name in quantities)


@pytest.mark.parametrize("stage", ["collect_rollouts", "evaluate"])
def test_stages_that_sample_are_refused(tmp_path, tiny_config, monkeypatch, stage):
    monkeypatch.undo()
    evaluation = {"every": 1, "num_tasks": 2, "adaptation_steps": 0, "test_episodes": 1}
    train(tiny_config(iterations=1, evaluation=evaluation), tmp_path / "run", backend=SERIAL)
    with pytest.raises(UsageError, match=f"the stage {stage} samples; choose"):
        optimize(tmp_path / "run", 0, stage=stage)


def test_settings_of_processing_take_effect_in_the_update(stored, monkeypatch):
    monkeypatch.setitem(sys.modules, "metaloom.flows.rollouts.dask", None)  # no workers start, as nothing is sampled
    result = optimize(stored, 1, ["processing.discount=0.5"])
    assert not result.changed.identical
    stored_return, changed_return = result.quantities()["step_0.average_discounted_return"]
    assert stored_return != changed_return


@pytest.mark.parametrize(
    ("setting", "stage", "first"),
    [
        ("processing.discount=0.5", "meta_optimize", "process_samples k=0"),
        ("baseline=linear_time", "meta_optimize", "process_samples k=0"),
        ("processing.gae_lambda=0.5", "adapt", "process_samples k=0"),
        ("algorithm.inner_lr=0.5", "adapt", "adapt k=0"),
        ("algorithm.outer_lr=0.5", "meta_optimize", "meta_optimize"),
    ],
)
def test_the_first_stage_that_a_setting_changes_is_named(stored, capsys, setting, stage, first):
    assert cli.run(["optimize", f"{stored}@1", "--set", setting, "--stage", stage]) == 0
    assert f"the first stage that changes is {first};" in " ".join(capsys.readouterr().out.split())


def test_a_setting_that_no_stage_computed_again_reads_is_said_to_have_no_effect(stored, capsys):
    assert cli.run(["optimize", f"{stored}@1", "--set", "algorithm.outer_lr=0.5", "--stage", "adapt"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "none of the recomputed stages (process_samples k=0, adapt k=0) is affected by the changed settings" in said
    assert optimize(stored, 1, ["seed=9"]).as_dict()["first_changed"] is None
    assert optimize(stored, 1).first_changed is None


def test_a_stage_of_arrays_is_compared_by_what_it_gives(stored):
    result = optimize(stored, 1, ["processing.discount=0.0"], stage="process_samples")
    rewards = storage.open_run(stored)[1].rollouts(0).rewards
    assert result.quantities()["mean returns"][1] == pytest.approx(rewards.mean(), rel=1e-5)
    tasks = optimize(stored, 1, stage="sample_tasks")
    assert tasks.quantities().keys() == {"mean params", "std params", "seconds"}  # not those of the tasks' ids


@pytest.mark.parametrize("change", ["algorithm=maml-trpo", "algorithm.name=maml-trpo"])
def test_another_algorithm_works_where_the_learner_fits(stored, change):
    result = optimize(stored, 1, [change])
    assert result.changed.learner.optimizer == {}
    assert result.changed.learner.extra.keys() == {"num_updates", "env_steps", "env_steps_nominal"}
    assert result.changed.learner.params.keys() == result.stored.learner.params.keys()
    assert result.quantities()["clip_eps"] == (0.3, None)
    title, rows = result.shown()
    assert title == f"Counterfactual of meta_optimize(i=1, k=0) under {change}"
    assert ("clip_eps", "0.3", "-") in rows


def test_another_kind_of_processing_comes_with_the_algorithm_that_needs_it(stored):
    assert optimize(stored, 0, ["algorithm=dice-maml"]).changed.config.processing.name == "dice"


def test_an_algorithm_that_needs_more_than_is_stored_is_refused_by_what_is_missing(tmp_path, tiny_config, monkeypatch):
    monkeypatch.undo()
    train(tiny_config(algorithm="maml-trpo", iterations=1), tmp_path / "trpo", backend=SERIAL)
    with pytest.raises(UsageError, match=r"algorithm=promp: the stored learner has nothing under optimizer\.\S+;"):
        optimize(tmp_path / "trpo", 0, ["algorithm=promp"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["num_tasks=8"], "changes to num_tasks affect sampling"),
        (["policy.hidden_sizes=[4]", "env=point"], "changes to env, policy"),
        (["algorithm.trainable_inner_lr=true"], r"has nothing under \S+log_inner_lr"),
        (["algorithm.inner_steps=2"], "reads the episodes of inner step 2, which are not stored"),
    ],
)
def test_what_would_need_sampling_or_another_learner_is_refused(stored, changes, message):
    with pytest.raises(UsageError, match=message):
        optimize(stored, 1, changes)


def test_an_iteration_that_is_not_stored_is_named(stored):
    with pytest.raises(StageMissing, match=r"collect_rollouts\(i=9, k=0\) is not stored"):
        optimize(stored, 9)


def test_settings_that_do_not_exist_are_refused_before_anything_is_computed(stored, monkeypatch):
    monkeypatch.setattr(Runner, "run", lambda *_, **__: pytest.fail("it computed"))
    with pytest.raises(ConfigError, match="clip_epsilon"):
        list(sweep(stored, 0, {"algorithm.clip_eps": ["0.1"], "algorithm.clip_epsilon": ["0.2"]}))


def test_sampling_is_refused_as_a_stage(stored):
    with pytest.raises(UsageError, match="samples; choose"):
        optimize(stored, 0, stage="collect_rollouts")


def test_a_grid_is_every_combination_of_its_values(stored):
    grid = {"algorithm.clip_eps": ["0.1", "0.3"], "algorithm.num_epochs": ["1", "2"]}
    results = list(sweep(stored, 1, grid, ["algorithm.outer_lr=0.001"]))
    assert [result.changed.settings[1:] for result in results] == [
        ("algorithm.clip_eps=0.1", "algorithm.num_epochs=1"),
        ("algorithm.clip_eps=0.1", "algorithm.num_epochs=2"),
        ("algorithm.clip_eps=0.3", "algorithm.num_epochs=1"),
        ("algorithm.clip_eps=0.3", "algorithm.num_epochs=2"),
    ]
    assert [result.changed.identical for result in results] == [False, False, False, True]


def test_a_grid_is_split_at_commas_outside_of_brackets_and_quotes():
    assert parse_grid(["a.b=1,2", "c=[1,2],[3]", "d={x: 1, y: 2},'p,q'"]) == {
        "a.b": ["1", "2"],
        "c": ["[1,2]", "[3]"],
        "d": ["{x: 1, y: 2}", "'p,q'"],
    }


@pytest.mark.parametrize("grid", [["a"], ["=1"], ["a="], ["a=1,,2"], ["a=1", "a=2"]])
def test_a_grid_without_key_or_value_is_refused(grid):
    with pytest.raises(UsageError, match="expected KEY=V1,V2"):
        parse_grid(grid)


def test_the_command_prints_both_outcomes(stored, capsys):
    assert cli.run(["optimize", f"{stored}@1", "--set", "algorithm.clip_eps=0.1"]) == 0
    printed = capsys.readouterr().out
    for word in (
        "as in the run",
        "changed",
        "loss_after",
        "meta_gradient_norm",
        "distance",
        "reproduces the stored output",
    ):
        assert word in printed
    (loss_before,) = (line for line in printed.splitlines() if line.strip().startswith("loss_before"))
    assert "(0 except for rounding: advantages have mean 0)" in loss_before


def test_the_grid_command_prints_one_table_and_json(stored, capsys):
    grid = ["--grid", "algorithm.clip_eps=0.1,0.2"]
    assert cli.run(["optimize", f"{stored}@1", *grid]) == 0
    printed = capsys.readouterr().out
    assert printed.count("as in the run") == 1
    assert printed.count("algorithm.clip_eps=0.") == 2
    assert cli.run(["optimize", f"{stored}@1", *grid, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["settings"] for row in rows] == [["algorithm.clip_eps=0.1"], ["algorithm.clip_eps=0.2"]]
    assert all(row["as_stored"] and not row["identical"] for row in rows)


def test_an_iteration_must_be_named(stored, capsys):
    assert cli.run(["optimize", str(stored)]) == 2
    assert "use RUN@ITERATION" in capsys.readouterr().err


def test_padding_counts_in_no_mean(tiny_config):
    mask = np.array([[[1, 1, 0]], [[1, 0, 0]]], np.float32)
    value = Samples(returns=2 * mask, values=3 * mask, advantages=4 * mask, mask=mask)
    outcome = Outcome((), tiny_config(), value, 1.0, identical=True, digests={})
    quantities = Counterfactual(StageRef(0, "process_samples"), outcome, outcome, {}).quantities()
    means = {name: stored for name, (stored, _) in quantities.items() if name.startswith(("mean", "std"))}
    assert means == {
        **{"mean returns": 2, "mean values": 3, "mean advantages": 4},
        **{"std returns": 0, "std values": 0, "std advantages": 0},
    }

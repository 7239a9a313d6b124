"""Comparisons of stored runs: what is read of them, what is refused, and what is said."""

import json
import math
import re
import shutil
from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest

import metaloom
from metaloom.flows import cli
from metaloom.flows.commands.compare import compare
from metaloom.flows.commands.train import train
from metaloom.flows.errors import UsageError
from metaloom.flows.formatting import number
from metaloom.flows.results.comparison import verdicts
from metaloom.flows.rollouts.workers import Backend
from metaloom.flows.run_groups import settings_of
from metaloom.pipeline.comparison.groups import Estimate, Pair
from metaloom.pipeline.config.input import override
from metaloom.pipeline.config.run import build_config
from metaloom.pipeline.estimation.statistics import interquartile_mean

EVALUATED = {"every": 1, "num_tasks": 3, "test_episodes": 2, "tasks": [[2, 2], [-2, 2], [2, -2]]}


@pytest.fixture(scope="module")
def make(tmp_path_factory, tiny_config):
    """Trains a tiny run with some settings, once for all tests that ask for the same."""
    folder, made, number = tmp_path_factory.mktemp("compared"), {}, count()

    def trained(*settings, name=None):
        if settings not in made:
            config = build_config(override(tiny_config().model_dump(mode="json"), ["iterations=2", *settings]))
            path = folder / (name or f"run-{next(number)}")
            train(config, path, backend=Backend(workers=0))
            made[settings] = path
        return metaloom.open_run(made[settings])

    return trained


@pytest.fixture
def runs(make):
    """Two settings with two seeds each."""
    return [make(f"algorithm.inner_lr={lr}", f"seed={seed}") for lr in (0.05, 0.1) for seed in (1, 2)]


@pytest.fixture
def evaluated(make):
    section = f"evaluation={json.dumps(EVALUATED)}"
    return [make(section, f"algorithm.inner_lr={lr}", f"seed={seed}") for lr in (0.05, 0.1) for seed in (1, 2)]


def test_runs_that_differ_only_in_their_seed_are_a_group_named_by_what_tells_it_apart(runs):
    found = compare(runs)
    assert {group.name: group.seeds for group in found.groups} == {
        "algorithm.inner_lr=0.05": [1, 2],
        "algorithm.inner_lr=0.1": [1, 2],
    }
    assert found.groups[0].iqm.value >= found.groups[1].iqm.value
    assert compare(runs[:2]).groups[0].name == "promp, point-corner"
    _, (_, *rows) = found.shown()
    ends = [f"{number(group.iqm.low)} to {number(group.iqm.high)}" for group in found.groups]
    assert rows == [(g.name, "2", number(g.iqm.value), end) for g, end in zip(found.groups, ends, strict=True)]


def test_the_score_is_the_return_of_every_task_after_adaptation_in_the_last_iterations(runs):
    found = compare(runs[:2], last=1)
    episodes = [run.episodes(-1).to_pandas() for run in runs[:2]]
    expected = np.array([e[e["step"] == 1].groupby("task")["return"].mean() for e in episodes])
    assert (found.metric, found.about) == (
        "return",
        "training return after adaptation, per task, in the last iteration",
    )
    assert compare(runs[:2]).about == "training return after adaptation, per task, over at most the last 10 iterations"
    np.testing.assert_allclose(np.array(found.groups[0].scores.runs), expected)
    assert found.groups[0].iqm.value == pytest.approx(interquartile_mean(expected.ravel()))
    assert [len(run) for run in compare(runs[:2], last=5).groups[0].scores.runs] == [8, 8]
    assert not found.groups[0].scores.same_tasks


def test_where_all_runs_have_stored_evaluations_it_is_that_of_their_tasks(evaluated):
    found = compare(evaluated)
    assert found.metric == "evaluation"
    assert found.about.startswith("test return after the last adaptation step, per task, in the last common evaluation")
    table = evaluated[0].evaluations(-1).to_pandas()
    tests = table[table["test"] & (table["adaptation_steps"] == 1)]
    (group,) = (group for group in found.groups if group.name == "algorithm.inner_lr=0.05")
    np.testing.assert_allclose(group.scores.runs[0], tests.groupby(["task_goal_y", "task_goal_x"])["return"].mean())
    assert group.scores.same_tasks  # the same three in all runs, though each tests them in an order of its own
    np.testing.assert_allclose(group.curve.values[-1], np.mean([run.mean() for run in group.scores.runs]))


def test_where_only_some_have_evaluations_it_says_so_and_takes_the_return(runs, evaluated):
    found = compare([evaluated[0], runs[1]])
    assert (found.metric, "1 of 2 runs have stored evaluations" in found.notes[0]) == ("return", True)
    with pytest.raises(UsageError, match=r"has no stored evaluation; .*evaluation.every"):
        compare([evaluated[0], runs[1]], metric="evaluation")


def test_any_metric_can_be_compared_and_an_unknown_one_gets_a_suggestion(runs, monkeypatch):
    found = compare(runs, metric="outer_kl", last=1)
    assert found.about == "outer_kl in the last iteration"
    assert compare(runs, metric="outer_kl", last=2).about == "outer_kl over at most the last 2 iterations"
    values = [run.metrics(-1)["outer_kl"][0].as_py() for run in runs]
    assert sorted(found.scores()["score"].to_pylist()) == pytest.approx(sorted(values))
    with pytest.raises(UsageError, match=r"no metric 'outer_kll'.*did you mean outer_kl"):
        compare(runs, metric="outer_kll")
    monkeypatch.setattr("metaloom.flows.commands.compare.last_return", lambda names: None)
    with pytest.raises(UsageError, match=r"has no returns among its metrics; choose a metric with --metric NAME$"):
        compare(runs)


def test_runs_are_compared_after_as_many_environment_steps_as_all_have(make, runs):
    longer = make("algorithm.inner_lr=0.1", "seed=3", "iterations=3")
    found = compare([*runs, longer], last=1)
    assert found.env_steps == 2 * 4 * 3 * 10 * 2
    assert found.notes[-1] == "compared by their last scores within 480 environment steps, which all have"
    (group,) = (group for group in found.groups if group.seeds == [1, 2, 3])
    second = longer.episodes(1).to_pandas()
    expected = second[second["step"] == 1].groupby("task")["return"].mean()
    np.testing.assert_allclose(group.scores.runs[2], expected)
    np.testing.assert_allclose(found.curve_steps, [240, 480])


@pytest.mark.parametrize("metric", ["return", "step_1.average_return"])
def test_a_run_that_ends_within_the_first_iteration_of_another_is_refused(make, runs, metric):
    larger = make("num_tasks=40", "episodes_per_task=3", "iterations=1", "algorithm.inner_lr=0.1", "seed=4")
    with pytest.raises(UsageError, match="has no score within 480 environment steps"):
        compare([*runs, larger], metric=metric)


def test_evaluations_that_no_run_has_in_common_are_refused(make, evaluated):
    other = make(
        f"evaluation={json.dumps(EVALUATED | {'every': 3})}", "iterations=3", "algorithm.inner_lr=0.1", "seed=4"
    )
    with pytest.raises(UsageError, match=r"no score within 480 .*Use --metric return, .*evaluation\.every"):
        compare([evaluated[0], other])


def test_tasks_of_one_environment_are_not_those_of_another(make):
    section = f"evaluation={json.dumps(EVALUATED)}"
    runs = [
        make(section, f"env={env}", f"seed={seed}") for env in ("point-corner", "point-momentum") for seed in (1, 2)
    ]
    more = f"evaluation={json.dumps(EVALUATED | {'num_tasks': 4, 'tasks': [*EVALUATED['tasks'], [-2, -2]]})}"
    other = make(more, "env=point-momentum", "seed=2")
    assert not any(g.scores.same_tasks for g in compare(runs, mixed=True, group=["env.name"]).groups)
    assert len(compare([*runs[:3], other], mixed=True, group=["env.name"]).groups) == 2


def test_runs_of_other_environments_are_refused_unless_told(make, runs):
    other = make("env=point-momentum", "algorithm.inner_lr=0.05", "seed=1")
    with pytest.raises(UsageError, match=r"different environments: .*point-corner.*point-momentum.*--mixed"):
        compare([runs[0], other])
    found = compare([runs[0], other], mixed=True)
    assert [group.name for group in found.groups] == ["promp, point-corner | point-momentum"]
    assert found.groups[0].scores.stratum_names == sorted({*found.groups[0].scores.strata})
    assert len(found.groups[0].scores.stratum_names) == 2
    by_env = compare([runs[0], other], mixed=True, group=["env.name"])
    assert {group.name for group in by_env.groups} == {"env.name=point-corner", "env.name=point-momentum"}
    with pytest.raises(UsageError, match="groups were trained in different environments"):
        compare([runs[0], runs[2], other], mixed=True)
    with pytest.raises(UsageError, match=r"environments: .* has max_episode_steps=10; .* has max_episode_steps=5;"):
        compare([runs[0], make("max_episode_steps=5", "algorithm.inner_lr=0.05", "seed=1")])


def test_settings_that_an_earlier_version_did_not_have_are_those_it_acted_by_unless_others_may_define_them():
    def found(algorithm):
        config = {"algorithm": {"name": algorithm}, "env": {"name": "point-corner"}, "iterations": 3}
        return settings_of(SimpleNamespace(config=config, capacity=7, info={"config": config}))

    assert {"iterations": "7", "env.name": "point-corner"}.items() <= found("promp").items()
    assert "algorithm.clip_eps" in found("promp")
    assert found("own:ProMP") == {"algorithm.name": "own:ProMP", "env.name": "point-corner", "iterations": "7"}


def test_other_evaluations_are_refused_unless_told(make, evaluated):
    section = json.dumps(EVALUATED | {"test_episodes": 1})
    other = make(f"evaluation={section}", "algorithm.inner_lr=0.05", "seed=9")
    with pytest.raises(UsageError, match=r"different evaluations: evaluation.test_episodes is 2 .* and 1 "):
        compare([evaluated[0], other])
    assert len(compare([evaluated[0], other], mixed=True).groups) == 1


def test_one_run_twice_is_refused(make, runs):
    with pytest.raises(UsageError, match="twice"):
        compare([runs[0], runs[0]])
    again = make("algorithm.inner_lr=0.05", "seed=1", "iterations=1")
    with pytest.raises(UsageError, match="same settings and seed 1"):
        compare([runs[0], again])


def test_iterations_that_a_fork_shares_with_its_parent_are_told(make, runs):
    parent = runs[0]
    fork = metaloom.fork(parent, 1, parent.path.with_name("forked"), algorithm={"inner_lr": 0.3})
    metaloom.resume(fork, progress=False)
    found = metaloom.compare([parent, metaloom.open_run(fork.path)])
    told = f"forked was forked from {parent.path.name}, whose settings apply to its first 1 iteration"
    assert told in found.notes
    assert not any("forked" in note for note in metaloom.compare([parent]).notes)


def test_forks_of_one_run_are_told_to_be_no_independent_seeds(make, runs):
    parent = runs[0]
    fork = metaloom.fork(parent, 0, parent.path.with_name("same-policy"), seed=77)
    metaloom.resume(fork, progress=False)
    kin = f"{parent.path.name}, same-policy begin with the same policy"
    found = metaloom.compare([*runs, metaloom.open_run(fork.path)])
    assert [note for note in found.notes if kin in note and "counted as 2 independent seeds" in note]
    assert not any("same policy" in note for note in metaloom.compare(runs).notes)


def test_groups_by_chosen_settings_put_together_what_else_differs(make, runs):
    other = make("algorithm.inner_lr=0.1", "algorithm.clip_eps=0.1", "seed=5")
    assert len(compare([*runs, other]).groups) == 3
    found = compare([*runs, other], group=["algorithm.inner_lr"])
    assert {group.name: len(group.scores) for group in found.groups} == {
        "algorithm.inner_lr=0.05": 2,
        "algorithm.inner_lr=0.1": 3,
    }
    with pytest.raises(UsageError, match=r"--group algorithm.iner_lr: .*did you mean algorithm.inner_lr"):
        compare(runs, group=["algorithm.iner_lr"])


def test_other_algorithms_are_told_by_their_names(make, runs):
    other = make("algorithm=maml-trpo", "seed=1")
    names = {group.name for group in compare([runs[0], runs[2], other]).groups}
    assert "algorithm.name=maml-trpo algorithm.inner_lr=0.1" in names
    assert {"algorithm.name=promp algorithm.inner_lr=0.05", "algorithm.name=promp algorithm.inner_lr=0.1"} < names


def test_what_groups_of_other_algorithms_differ_in_besides_is_told(make, runs):
    other = make("algorithm=maml-trpo", "algorithm.inner_lr=0.2", "policy.min_std=0.5", "seed=1")
    (note,) = compare([runs[0], other]).notes
    assert re.fullmatch(r"the groups differ in more than the settings that name them: .*", note)
    assert "algorithm.inner_lr (0.05, 0.2)" in note
    assert "policy.min_std (1e-06, 0.5)" in note
    assert "clip_eps" not in note  # which MAML-TRPO does not have
    assert "seed" not in note
    assert compare([runs[0], other], group=["algorithm.name"]).notes == ()
    assert compare(runs).notes == ()  # their names tell all


def test_too_few_seeds_are_said_plainly(runs):
    found = compare(runs)
    (verdict,) = found.verdicts
    assert verdict.startswith("too few seeds to rank algorithm.inner_lr=")
    assert verdict.endswith("with 2 and 2 runs the smallest possible p-value is 0.33; 4 runs per group could suffice")
    assert compare(runs[:1]).verdicts == ("only one group: nothing to compare",)
    assert np.isnan(compare(runs[:1]).groups[0].iqm.low)
    enough = replace(found.pairs[0], smallest_p=0.01)
    title, _ = replace(found, pairs=4 * (enough,)).shown()
    assert title.count("cannot be ranked") == 3  # the first of the verdicts


def test_a_verdict_says_which_group_is_higher_by_how_much_and_how_sure_that_is():
    def pair(p, *, shown=False, smallest=0.01, exact=True, low=0.5):
        difference, improvement = Estimate(1.5, low, 2.5), Estimate(0.9, 0.8, 1.0)
        return Pair("one", "two", difference, improvement, SimpleNamespace(exact=exact), p, shown, smallest)

    def said(*pairs):
        return verdicts(pairs, {"one": 3, "two": 4})

    higher, by = "one is higher than two: 1.5, 95% interval 0.5 to 2.5", "exact permutation test"
    assert said(pair(0.0001, shown=True)) == (f"{higher} (p = 0.0001, {by})",)
    assert said(pair(0.2, exact=False, low=math.nan)) == (
        "one and two cannot be ranked: the difference is 1.5 (p = 0.2, drawn permutation test)",
    )
    too_few = "too few seeds to rank one and two: with 3 and 4 runs"
    assert said(pair(1.0, smallest=0.1)) == (
        f"{too_few} the smallest possible p-value is 0.1; 4 runs per group could suffice",
    )
    assert said(pair(0.00009, shown=True), pair(1.0, smallest=0.3)) == (
        f"{higher} (p < 0.0001, {by}, Holm over 2 pairs)",
        f"{too_few} and 2 pairs the smallest possible p-value is 0.3; 5 runs per group could suffice",
    )
    assert said(pair(1.0, smallest=0.3), pair(1.0, smallest=0.4)) == (
        "too few seeds to rank any two of 2 groups: with 2 pairs the smallest possible p-value is 0.3; "
        "5 runs per group could suffice",
    )


def test_the_same_comparison_gives_the_same_numbers_and_another_seed_others(runs):
    first, again, other = compare(runs), compare(runs[::-1]), compare(runs, seed=1)
    assert first.table() == again.table()
    assert first.table()["iqm_low"] != other.table()["iqm_low"]
    assert first.as_dict()["bootstrap"] == {
        "seed": 0,
        "resamples": 2000,
        "resampled": "runs",
        "interval": "student",
    }


def test_tables_have_a_row_for_everything(runs):
    found = compare(runs)
    assert found.table()["group"].to_pylist() == [group.name for group in found.groups]
    assert found.differences().num_rows == 1
    assert found.curves().num_rows == 2 * len(found.curve_steps)
    assert found.profiles().num_rows == 2 * len(found.thresholds)
    assert {*found.scores().to_pandas().groupby(["group", "run"]).size()} == {8}


def test_the_command_prints_says_and_plots(runs, tmp_path, capsys):
    folders = [str(run.path) for run in runs]
    for name in ("comparison.png", "comparison.svg"):
        assert cli.run(["compare", *folders, "--plot", str(tmp_path / name)]) == 0
        assert (tmp_path / name).stat().st_size > 10_000
    told = capsys.readouterr().out
    assert "too few seeds to rank" in told
    assert "2,000 bootstrap resamples of whole runs, seed 0" in told
    assert cli.run(["compare", *folders, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert len(document["groups"]) == 2
    assert document["pairs"][0]["shown"] is False
    for more, problem in (
        ([folders[0]], "twice"),
        (["--plot", "x.jpg"], "plot file"),
        (["--last", "0"], "Must be >= 1"),
    ):
        assert cli.run(["compare", *folders, *more]) == 2
        assert problem in capsys.readouterr().err


def test_names_patterns_and_lists_all_name_runs(runs, tmp_path, monkeypatch):
    monkeypatch.setenv("METALOOM_RUNS", str(tmp_path))
    for n, run in enumerate(runs):
        shutil.copytree(run.path, tmp_path / f"mine-{n}")
    by_name = metaloom.compare(["mine-0", "mine-1", "mine-2", "mine-3"])
    assert by_name.table() == metaloom.compare(runs).table()
    assert metaloom.compare("mine-*").table() == by_name.table()
    assert metaloom.compare("mine-0").groups[0].seeds == [1]
    with pytest.raises(UsageError, match="no runs to compare"):
        metaloom.compare([])


def test_a_single_task_has_a_score_for_every_iteration(tmp_path):
    settings = {"env": "CartPole-v1", "algorithm": "a2c", "iterations": 2, "max_episode_steps": 10}
    train(build_config(settings), tmp_path / "one", backend=Backend(workers=0))
    run = metaloom.open_run(tmp_path / "one")
    expected = run.metrics()["step_0.average_return"].to_pylist()
    assert metaloom.compare(run).groups[0].scores.runs[0].tolist() == pytest.approx(expected)

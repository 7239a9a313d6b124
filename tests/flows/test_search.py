"""Searches: what they refuse, what they suggest, that kills change nothing, and that stored runs score."""

import json
import multiprocessing
import os
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_runs import SMALL_SWEEP

import metaloom
from metaloom import storage
from metaloom.flows import cli
from metaloom.flows.commands.sweep import late_mean, train_sweep, trials_of
from metaloom.flows.errors import UsageError
from metaloom.flows.results.sweep import SweepObserver, Trial, best_of
from metaloom.flows.rollouts.workers import Backend
from metaloom.flows.sweeps.plan import plan_search
from metaloom.flows.sweeps.space import Choice, Range, Search, parse_space
from metaloom.flows.sweeps.stored import find_sweep
from metaloom.flows.sweeps.suggestions import suggest
from metaloom.pipeline.envs.contract import EnvError
from metaloom.pipeline.schema import ConfigError

SERIAL = Backend(workers=0)
SPACE = {"algorithm.inner_lr": "0.01:0.3:log", "policy.activation": "tanh,relu"}


@pytest.fixture(autouse=True)
def runs_folder(tmp_path, monkeypatch, pytestconfig) -> Path:
    """A runs folder of the test; processes that are started import this file by its name, from the project's root."""
    monkeypatch.setenv("METALOOM_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr(sys, "path", [*sys.path, str(pytestconfig.rootpath)])
    return tmp_path / "runs"


def planned(*, trials=3, space=SPACE, seeds=1, metric="return", settings=()):
    search = Search(trials, metric, space)
    return plan_search("promp-point-corner", "lr", search=search, seeds=seeds, settings=(*SMALL_SWEEP, *settings))


def trained(sweep, **options):
    return train_sweep(sweep, [], backend=SERIAL, **options)


def words(*more, trials=2, space=SPACE):
    searched = [word for key, text in space.items() for word in ("--search", f"{key}={text}")]
    sets = [word for setting in SMALL_SWEEP for word in ("--set", setting)]
    return [
        *["sweep", "promp-point-corner", "--name", "lr", "--optuna", str(trials), *searched, *sets, "--workers", "0"],
        *more,
    ]


def test_a_search_trains_its_trials_as_runs_and_tells_the_best_of_their_stored_scores(runs_folder, capfd):
    assert cli.run(words("--seeds", "2")) == 0
    told, errors = capfd.readouterr()
    assert errors == ""
    names = [f"lr-trial-{number:03}-seed-{seed}" for number in range(2) for seed in (1, 2)]
    runs = {run.name: run for run in metaloom.open_runs("lr-*")}
    assert sorted(runs) == names
    # Two iterations: a tenth of them, rounded up, is the last one.
    last = {name: run.metrics()["step_1.average_return"].to_pylist()[-1] for name, run in runs.items()}
    scores = [np.mean([last[name] for name in names[2 * number :][:2]]) for number in range(2)]
    assert cli.run(["sweep", "lr", "--status", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert [row["score"] for row in found["runs"]] == pytest.approx(np.repeat(scores, 2))
    assert [row["trial"] for row in found["runs"]] == [0, 0, 1, 1]
    best = found["best"]
    assert (best["trial"], best["score"]) == (np.argmax(scores), pytest.approx(max(scores)))
    for key, text in best["settings"].items():
        assert f"--set {key}={text}" in told
        section, _, field = key.partition(".")
        for seed in (1, 2):
            assert str(runs[f"lr-trial-{best['trial']:03}-seed-{seed}"].config[section][field]) == text
    assert f"best: trial {best['trial']} of 2 with a score" in told
    assert "--name lr-best --seeds 3,4,5,6,7 --set env.options.reward=dense" in told
    assert sorted(os.listdir(runs_folder)) == [*names, "sweeps"]  # and no database
    # By its name alone: nothing is left to do.
    assert cli.run(["sweep", "lr"]) == 0
    assert "begins" not in capfd.readouterr().out


def killed_search(root, event, trial):
    """Begin the search, and be killed in its middle."""
    os.environ["METALOOM_RUNS"] = root

    def kill(run, *report):
        if run.name == f"lr-trial-{trial:03}-seed-1":
            os.kill(os.getpid(), signal.SIGKILL)

    trained(planned(), observer=SweepObserver(**{event: kill}))


@pytest.mark.no_cover
@pytest.mark.parametrize(("event", "trial"), [("iteration_done", 1), pytest.param("begun", 2, marks=pytest.mark.slow)])
def test_a_killed_search_goes_on_to_the_trials_and_digests_of_one_that_was_not(
    event, trial, runs_folder, tmp_path, digests, monkeypatch
):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["metaloom.flows.commands.train"])
    process = context.Process(target=killed_search, args=(str(runs_folder), event, trial))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    stored = find_sweep("lr")
    assert len(stored.runs) == trial + 1  # also that which was about to begin
    assert not trained(planned()).stopped
    killed = find_sweep("lr")
    monkeypatch.setenv("METALOOM_RUNS", str(tmp_path / "whole"))
    trained(planned())
    whole = find_sweep("lr")
    assert killed.document() == whole.document()
    assert len(whole.runs) == 3
    for run in whole.runs:
        assert digests(killed.folder(run)) == digests(whole.folder(run))


def test_asked_to_stop_it_goes_on_there_and_more_trials_need_extend(runs_folder):
    ended = []
    result = trained(planned(), observer=SweepObserver(ended=ended.append, should_stop=lambda: len(ended) > 0))
    assert result.stopped
    assert [trial.score is None for trial in trials_of(find_sweep("lr"))] == [False, True]
    with pytest.raises(UsageError, match=r"trials: 3 before, 4 now\. --extend .* adds the 1 new runs"):
        trained(planned(trials=4))
    with pytest.raises(UsageError, match=r"trials: 3 before, 2 now\. Use --name to start another"):
        trained(planned(trials=2), extend=True)
    for changed in ({"seeds": 2}, {"metric": "step_0.average_return"}, {"space": SPACE | {"num_epochs": "1:2"}}):
        with pytest.raises((UsageError, ConfigError)):
            trained(planned(**changed), extend=True)
    trained(planned(trials=4), extend=True)
    stored = find_sweep("lr")
    assert (stored.search.trials, len(stored.runs)) == (4, 4)
    assert (planned(trials=2).runs, planned(trials=5).runs) == (stored.runs[:2], stored.runs)
    scores = [trial.score for trial in trials_of(stored)]
    assert best_of(trials_of(stored)).score == max(scores)
    assert best_of([Trial(2, (), 1.5), Trial(0, (), None), Trial(1, (), 1.5), Trial(3, (), 0.5)]).number == 1  # a tie


def test_a_search_goes_on_alike_whatever_the_order_of_its_settings_in_the_command(runs_folder, monkeypatch, tmp_path):
    trained(planned(trials=1))
    trained(planned(space=dict(reversed(SPACE.items()))), extend=True)
    mixed = find_sweep("lr")
    monkeypatch.setenv("METALOOM_RUNS", str(tmp_path / "whole"))
    trained(planned())
    assert json.dumps(mixed.document()) == json.dumps(find_sweep("lr").document())
    elsewhere = os.fsdecode(os.fsencode(tmp_path) + b"/\xff")  # the name of a folder need not be UTF-8
    shutil.copytree(tmp_path / "whole" / "sweeps", Path(elsewhere) / "sweeps")
    monkeypatch.setenv("METALOOM_RUNS", elsewhere)
    assert find_sweep("lr").document() == mixed.document()


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"space": {"algorithm.iner_lr": "0.1:1"}}, r"--search algorithm.iner_lr=0.1: .*did you mean inner_lr"),
        ({"space": {"algorithm.inner_lr": "-1.0:1.0"}}, r"--search algorithm.inner_lr=-1.0: .*got -1"),
        ({"space": {"algorithm.inner_steps": "1.0:3.0"}}, "expected an integer, got 1.0"),
        ({"trials": 1, "space": {"policy.activation": "tanh,relux"}}, r"--search policy.activation=relux: .*relux"),
        ({"space": {"algorithm.inner_lr": "0.3:0.01"}}, "0.3:0.01 is empty; the lower"),
        ({"space": {"algorithm.inner_lr": "0.3:0.3"}}, "is empty"),
        ({"space": {"algorithm.inner_lr": "0.1:0.10000000000000002"}}, "is too narrow"),
        ({"space": {"algorithm.inner_lr": "1000000000.0:1000000000.5"}}, "is too narrow"),
        ({"space": {"algorithm.inner_lr": "0:0.3:log"}}, r"logarithm of 0; use a lower bound above 0"),
        ({"space": {"algorithm.inner_lr": "0.1:1e999"}}, "must be finite in float64"),
        ({"space": {"algorithm.inner_lr": "-1e308:1e308"}}, "the distance between them must be finite in float64"),
        ({"space": {"algorithm.inner_steps": f"1:{2**53 + 1}"}}, "at most 9,007,199,254,740,992"),
        ({"space": {"algorithm.inner_steps": f"1:{'9' * 5000}"}}, "at most 9,007,199,254,740,992"),
        ({"space": {"algorithm.inner_lr": "0.1"}}, "expected a range such as"),
        ({"space": {"algorithm.inner_lr": "0.1:0.3:lin"}}, "expected a range such as"),
        ({"space": {"algorithm.inner_lr": "0.1,"}}, "expected a range such as"),
        ({"space": {"policy.activation": "tanh,tanh"}}, "repeats a value"),
        ({"trials": 1, "space": {"algorithm.inner_lr": "0.1,0.10"}}, "the same settings"),
        ({"space": {"seed": "1:3"}}, "use --seeds"),
        ({"space": {"num_tasks": "2:3"}}, "num_tasks is set by both --search and --set"),
        ({"space": {}}, "nothing to search"),
        ({"trials": 0}, "--optuna must be at least 1, got 0"),
        (
            {"trials": 7, "space": {"algorithm.inner_steps": "1:3", "policy.activation": "tanh,relu"}},
            "must be at most 6, the number of combinations .*, got 7",
        ),
        ({"trials": 501, "seeds": 2}, r"1,002 runs; .*--yes"),
        ({"trials": 1001}, r"1,001 runs; more than 1,000 require --yes"),
        ({"metric": "evaluation"}, r"add --set evaluation.every"),
    ],
)
def test_a_bad_search_is_refused_before_anything_starts(changed, problem, runs_folder):
    with pytest.raises((UsageError, ConfigError), match=problem):
        trained(planned(**changed))
    assert not runs_folder.exists()


def test_the_widest_and_the_narrowest_ranges_and_the_most_trials_can_be_searched():
    texts = {"a": f"1:+{2**53}", "b": "999999999.0:1000000000.0", "c": "1.0:1.0000000015"}
    found = Search(1, "return", texts).dimensions
    assert found["a"] == Range(1, 2**53, log=False, whole=True)
    assert [(found[key].low, found[key].high) for key in "bc"] == [(999999999, 1000000000), (1, 1.0000000015)]
    assert planned(trials=1000).num_runs == 1000


def test_what_only_building_a_run_shows_is_refused_before_the_first_trial():
    settings = [setting for setting in SMALL_SWEEP if not setting.startswith("env.")]
    search = Search(2, "return", {"env.options.reward": "dense,no"})
    sweep = plan_search("promp-point-corner", "r", search=search, settings=settings)
    assert sweep.seeds == (1,)
    with pytest.raises(EnvError, match="reward"):
        trained(sweep)
    assert find_sweep("r") is None


def test_the_command_refuses_options_that_do_not_belong_together(capsys):
    for more, problem in (
        (["--grid", "algorithm.inner_lr=0.1,0.2"], "--grid cannot be combined with --optuna; use --search KEY=V1,V2"),
        (["--search", "algorithm.inner_lr=0.1:0.2"], "--search algorithm.inner_lr is given twice"),
        (["--search", "algorithm.clip_eps"], "--search algorithm.clip_eps: expected KEY=VALUES"),
        (["--parallel", "2"], "each trial of the search has 1 run; use at most that"),
    ):
        assert cli.run(words(*more)) == 2, more
        assert problem in capsys.readouterr().err
    for more, option in ((["--search", "a=1:2"], "search"), (["--metric", "return"], "metric")):
        assert cli.run(["sweep", "promp-point-corner", *more]) == 2
        assert f"--{option} requires --optuna" in capsys.readouterr().err
    with pytest.raises(UsageError, match="--search requires --optuna"):
        metaloom.sweep("promp-point-corner", search={"algorithm.inner_lr": "0.1:1"})


def test_without_optuna_the_extra_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert cli.run(words()) == 2
    assert "optuna is not installed; `pip install 'metaloom[optuna]'` installs it" in capsys.readouterr().err


def test_an_unknown_metric_stops_the_first_trial_and_another_one_goes_on_with_it(runs_folder, capsys):
    with pytest.raises(UsageError, match=r"has no metric 'outer_los'"):
        trained(planned(trials=1, metric="outer_los"))
    (run,) = storage.find_runs(runs_folder)
    assert len(storage.open_run(run).iterations) == 1
    result = trained(planned(trials=1, metric="env_steps"))
    (trial,) = trials_of(result.sweep)
    # 2 tasks, 2 episodes of 4 steps before and after adaptation: 32 steps in each of 2 iterations.
    assert trial.score == 64


def test_failed_trials_and_settings_that_cannot_be_together_do_not_end_a_search(capsys):
    space = {"algorithm.inner_lr": "0.1,1e30", "algorithm.inner_steps": "1,0"}
    space["algorithm.trainable_inner_lr"] = "false,true"
    assert cli.run(words(trials=8, space=space)) == 0
    told = capsys.readouterr().out
    found = {
        (t.runs[0].settings["algorithm.inner_lr"], *[*t.runs[0].settings.values()][1:]): t.score
        for t in trials_of(find_sweep("lr"))
    }
    assert len(found) == 8
    for (inner_lr, inner_steps, trainable), score in found.items():
        impossible, diverges = (inner_steps, trainable) == ("0", "true"), (inner_lr, inner_steps) == ("1e30", "1")
        assert (score is None) == (impossible or diverges), (inner_lr, inner_steps, trainable)
    assert "trainable_inner_lr is on but inner_steps is 0" in told
    assert "of 4 with a score" in told
    # All that is left fails again, which is told and changes nothing.
    assert cli.run(["sweep", "lr", "--workers", "0"]) == 0
    assert capsys.readouterr().out.count("failed  lr-trial") == 4


def test_a_search_whose_trials_all_fail_has_failed(capsys):
    assert cli.run(words(trials=1, space={"algorithm.inner_lr": "1e30:1e31"})) == 1
    assert "no trial has a score" in capsys.readouterr().out


def test_the_score_is_the_mean_of_the_last_tenth_of_the_iterations():
    every = np.arange(30)
    assert late_mean(every, every**2.0, 30) == (27**2 + 28**2 + 29**2) / 3
    assert late_mean(every[:21], every[:21] * 1.0, 21) == 19  # 18, 19, 20: a tenth, rounded up
    assert late_mean(every[:1], np.array([5.0]), 1) == 5
    # Evaluations of every tenth iteration: one in the last tenth, or none.
    assert late_mean(np.array([9, 19, 29]), np.array([1.0, 2.0, 3.0]), 30) == 3
    assert late_mean(np.array([9, 19]), np.array([1.0, 2.0]), 30) == 2


@given(st.data())
def test_every_value_of_a_range_or_choice_is_read_back_from_its_text(data):
    low, high = sorted(data.draw(st.lists(st.integers(-99, 99), min_size=2, max_size=2, unique=True)))
    whole = data.draw(st.booleans())
    search = Search(1, "return", {"a": f"{low}:{high}" if whole else f"{low}.0:{high}.0", "b": "x,[1,2],'p,q'"})
    value = data.draw(st.integers(low, high) if whole else st.floats(low, high))
    choice = data.draw(st.sampled_from(["x", "[1,2]", "'p,q'"]))
    assert search.dimensions == {"a": Range(low, high, False, whole), "b": Choice(("x", "[1,2]", "'p,q'"))}
    texts = {"a": search.dimensions["a"].text(value), "b": choice}
    assert search.values(texts) == {"a": value, "b": choice}
    with pytest.raises(ValueError, match="is not between"):
        search.values(texts | {"a": search.dimensions["a"].text(high + 1)})
    assert parse_space([f"{key}={text}" for key, text in search.space.items()]) == search.space


def test_a_suggestion_depends_on_the_seed_and_the_trials_before_alone_and_is_never_repeated(monkeypatch):
    monkeypatch.setattr("metaloom.flows.sweeps.suggestions.count", lambda: range(100))  # draws that are far too many
    search = Search(6, "return", {"a": "1:3", "b": "x,y"})
    told = []
    for number in range(6):
        point = suggest(search, told, 1)
        suggest(search, [], 7)  # what else was asked makes no difference
        assert suggest(search, told, 1) == point
        told.append((point, -float(number)))
    assert len({tuple(point.values()) for point, _ in told}) == 6
    wide = Search(6, "return", {"a": "0.01:1:log"})
    firsts = [suggest(wide, [], seed)["a"] for seed in (1, 2)]
    assert len({*firsts, suggest(wide, [({"a": "0.5"}, 1.0)], 1)["a"]}) == 3
    lows = [float(suggest(wide, [], seed)["a"]) < 0.1 for seed in range(40)]
    assert 10 <= sum(lows) <= 30  # half of a logarithmic range


def test_suggestions_come_to_where_scores_are_high_and_leave_where_trials_fail():
    search = Search(40, "return", {"a": "0.0:1.0", "b": "x,y"})
    told = []
    for _ in range(40):
        point = suggest(search, told, 3)
        a = float(point["a"])
        told.append((point, None if a > 0.5 else -((a - 0.25) ** 2) - (point["b"] == "y")))
    early, late = ([abs(float(point["a"]) - 0.25) for point, _ in part] for part in (told[:10], told[20:]))
    assert np.mean(late) < np.mean(early) / 2
    assert sum(score is None for _, score in told[20:]) <= 4
    assert sum(point["b"] == "x" for point, _ in told[20:]) >= 15


def test_a_file_with_other_trials_than_its_search_has_is_refused():
    trained(planned(trials=1))
    file = find_sweep("lr").file
    document = json.loads(file.read_text())
    (run,) = document["runs"]
    search = document["search"]
    wrong = [
        {"runs": [run | {"settings": settings}]}
        for settings in ({}, run["settings"] | {"policy.activation": "evil:E"}, run["settings"] | {"env": "evil:E"})
    ]
    wrong += [{"runs": [run, run | {"name": "another"}]}, {"seeds": []}, {"seeds": [5]}, {"grid": 3}]
    wrong += [{"format": "metaloom-sweep/2"}, {"runs": [run, run], "search": search | {"trials": 2}}]
    searches = ({"trials": 0}, {"trials": "2"}, {"space": {}}, {"space": {"a": "b"}})
    wrong += [{"search": search | part} for part in searches]
    wrong += [{"runs": [], "search": search | part} for part in ({"trials": 0}, {"space": {}})]
    for part in wrong:
        file.write_text(json.dumps(document | part))
        with pytest.raises(UsageError, match="is not a sweep in the format"):
            find_sweep("lr")


def test_a_search_of_somebody_else_imports_nothing_that_its_file_names(tmp_path, monkeypatch, capsys):
    (tmp_path / "evil_module.py").write_text(f"open({str(tmp_path / 'CALLED')!r}, 'w')")
    monkeypatch.syspath_prepend(tmp_path)
    trained(planned(trials=1))
    file = find_sweep("lr").file
    document = json.loads(file.read_text())
    for given_value in ("evil_module:Net", '"evil_module\\x3aNet"'):
        space = document["search"]["space"] | {"policy.network": f"mlp,{given_value}"}
        file.write_text(json.dumps(document | {"runs": [], "search": document["search"] | {"space": space}}))
        assert cli.run(["sweep", "lr"]) == 2
        assert "its settings name evil_module:" in capsys.readouterr().err
        assert cli.run(["sweep", "lr", "--status"]) == 0
        capsys.readouterr()
    assert not (tmp_path / "CALLED").exists()


def test_the_python_api_searches_and_gives_the_runs(capsys):
    settings = {"num_tasks": 2, "episodes_per_task": 2, "max_episode_steps": 4, "iterations": 1}
    options = {"policy": {"hidden_sizes": [4]}, "progress": False, **settings}
    space = {"algorithm.inner_lr": "0.05:0.5:log", "algorithm.clip_eps": [0.1, 0.3]}
    runs = metaloom.sweep("promp-point-corner", "mine", optuna=2, search=space, **options)
    assert [run.name for run in runs] == ["mine-trial-000-seed-1", "mine-trial-001-seed-1"]
    assert {run.config["algorithm"]["clip_eps"] for run in runs} <= {0.1, 0.3}
    assert find_sweep("mine").search == Search(2, "return", space | {"algorithm.clip_eps": "0.1,0.3"})


def test_a_dry_run_of_a_search_creates_nothing(runs_folder, capsys):
    assert cli.run(words("--dry-run", "--seeds", "2")) == 0
    assert "4 runs: 4 waiting" in capsys.readouterr().out
    assert not runs_folder.exists()

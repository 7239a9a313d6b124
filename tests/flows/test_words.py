import re
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

from metaloom.flows.formatting import (
    adaptation_label,
    adaptation_returns,
    age,
    count,
    dotted,
    duration,
    finite,
    number,
    short_time,
    size,
    stage_name,
)
from metaloom.flows.results.checks import what_helps
from metaloom.flows.results.disk import Packed, Removed, ThinnedRun
from metaloom.flows.results.replay import Difference, RunDiff
from metaloom.pipeline.shown import printable
from metaloom.storage import StageRef, StageTable, StoredStage
from metaloom.storage.format.stages import LEARNER, STEP
from metaloom.storage.read.verify import _FOREIGN, _LINK, _UNREADABLE, Damage


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (-20.1267, "−20.13"),
        (0.00012345678, "0.0001235"),
        (0.0, "0"),
        (12345.678, "12,345.68"),
        (-200.0, "−200"),
        (1e14, "100,000,000,000,000"),
        (-1e308, "−1e+308"),
        (9.875, "9.875"),
        (10.5, "10.50"),
        (1e15, "1e+15"),
        (1e15 + 0.5, "1e+15"),
        (float("nan"), "nan"),
    ],
)
def test_numbers_have_the_digits_that_tell_something(value, text):
    assert number(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((0, "0"), (950, "950"), (39_214, "39.2 k"), (1_920_000, "1.92 M")),
        *((999, "999"), (1000, "1 k"), (10**6, "1 M"), (10**9, "1 G"), (-(10**9), "-1 G")),
    ],
)
def test_counts_are_short(value, text):
    assert count(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(950, "950 B"), (28_300_000, "28.3 MB"), (27e9, "27 GB"), (2.71e12, "2.71 TB")]
)
def test_sizes_are_in_powers_of_a_thousand(value, text):
    assert size(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0:00:00"), (63, "0:01:03"), (3600, "1:00:00"), (3600 * 27 + 61, "27:01:01")]
)
def test_durations_are_hours_minutes_seconds(seconds, text):
    assert duration(seconds) == text


def test_short_times_are_in_seconds_or_milliseconds():
    assert [short_time(seconds) for seconds in (1.934, 0.0172, 0.000221)] == ["1.93 s", "17.2 ms", "0.221 ms"]
    assert [short_time(seconds) for seconds in (1, 0.999)] == ["1 s", "999 ms"]


def test_the_age_of_a_stored_time_is_told_in_its_largest_unit(monkeypatch):
    monkeypatch.setattr("metaloom.flows.formatting.time", SimpleNamespace(time=lambda: 1e9))
    ages = {
        **{-5: "0 s ago", 0: "0 s ago", 59: "59 s ago", 60: "1 min ago", 3599: "59 min ago", 3600: "1 h ago"},
        **{86_399: "23 h ago", 86_400: "1 d ago", 10 * 86_400 - 1: "9 d ago"},
    }
    assert {seconds: age(datetime.fromtimestamp(1e9 - seconds, UTC).isoformat()) for seconds in ages} == ages
    assert [age(moment) for moment in ("yesterday", None, "0001-01-01T00:00:00")] == [""] * 3


def test_only_built_in_stages_that_run_once_per_iteration_are_named_without_a_step_whatever_tables_were_read():
    def table(group):
        learners = StoredStage("initialize", LEARNER, "Update"), StoredStage("evolve", LEARNER, "Update", False, True)
        return StageTable((*learners, StoredStage("halve", group, "Samples")))

    def labels():
        refs = StageRef(3, "adapt"), StageRef(3, "adapt", 1), StageRef(3, "meta_optimize"), StageRef(3, "halve")
        return [stage_name(ref) for ref in refs]

    expected = ["adapt k=0", "adapt k=1", "meta_optimize", "halve k=0"]
    assert labels() == expected
    for groups in (("halve", "halve_{step}"), ("halve_{step}", "halve")):
        tables = [*map(table, groups)]
        assert [one["halve"].stepped for one in tables] == [STEP in group for group in groups]
        assert labels() == expected


def test_adaptation_returns_come_in_the_order_of_rounds_and_end_at_the_first_missing_one():
    metrics = {
        "step_1.average_return": 2.0,
        "step_0.average_return": 1.0,
        "step_3.average_return": 9.0,
        "loss_before": 5.0,
    }
    assert adaptation_returns(metrics) == [1.0, 2.0]


def test_rounds_are_named_before_between_and_after_adaptation():
    assert [adaptation_label(k, 3) for k in range(4)] == [
        "before adaptation",
        "after 1 inner step",
        "after 2 inner steps",
        "after adaptation",
    ]
    assert adaptation_label(0, 0) == "return"


def test_json_gets_null_where_it_has_no_number():
    assert [finite(value) for value in (1.5, float("nan"), float("inf"))] == [1.5, None, None]


def test_stored_text_cannot_drive_a_terminal():
    assert printable("ok \x1b[31mred\x07 ünï") == "ok \N{REPLACEMENT CHARACTER}[31mred\N{REPLACEMENT CHARACTER} ünï"


def test_dotted_names_are_spelled_as_set_takes_them():
    config = {"seed": 1, "env": {"name": "point-2d", "options": {}, "wrappers": ["ü"]}, "algorithm": {"inner_lr": 0.1}}
    assert list(dotted(config)) == [
        ("seed", "1"),
        ("env.name", "point-2d"),
        ("env.options", "{}"),
        ("env.wrappers", '["ü"]'),
        ("algorithm.inner_lr", "0.1"),
    ]


def test_what_thins_and_removes_runs_says_how_much_of_what():
    one, other = Path("runs/one"), Path("runs/.other")
    finished = f"finished the removal of {other}\n"
    assert str(Removed((one,), 1_500_000, ())) == "removed 1 run, 1.5 MB freed"
    assert str(Removed((one, one), 0, (other,))) == f"{finished}removed 2 runs, 0 B freed"
    assert str(Removed((), 0, (other,))) == f"{finished}1 removal to finish"
    assert str(Removed((), 0, ())) == "no removal to finish"
    kept = "; a fork that shares files keeps them on the disk"
    assert str(ThinnedRun((0, 2), 1, 2_000)) == f"removed: 2 iterations, 1 file, 2 kB{kept}"
    assert str(ThinnedRun((), 0, 0, dry_run=True)) == f"would remove: 0 iterations, 0 files, 0 B{kept}"


def test_packing_tells_how_many_iterations_are_in_which_segments():
    assert str(Packed(())) == "nothing to pack: every complete iteration but the newest is packed already"
    packed = Packed((range(0, 4), range(4, 5)))
    assert str(packed) == "packed 5 iterations into 2 segments"
    assert packed.as_dict() == {"iterations": 5, "segments": [[0, 3], [4, 4]]}


def test_two_runs_that_differ_are_told_with_what_only_one_of_them_has():
    setting = Difference("seed", "1", None)
    found = RunDiff(Path("a"), Path("b"), (setting,), (), None, (), compared=3, different=0, only_a=1, only_b=0)
    rows = [("setting", "a", "b"), ("seed", "1", "None")]
    assert found.shown() == ("RunDiff of a and b: 3 outputs equal; 1 only in a, 0 only in b", rows)
    assert not found.equal
    found = replace(found, settings=(), first=StageRef(2, "adapt"), different=1, only_a=0)
    assert found.shown() == ("RunDiff of a and b: first difference in adapt(i=2, k=0)", [])
    assert not found.equal
    assert replace(found, first=None, different=0).equal


@pytest.mark.parametrize(
    ("problems", "helps"),
    [
        ([], []),
        (["has other bytes"], ["repair it with: metaloom resume ./run --repair"]),
        (["has other bytes", _FOREIGN], ["repair it", "remove or move"]),
        ([_UNREADABLE, "has other bytes"], ["files that you may not read were not checked"]),
        ([_UNREADABLE, _FOREIGN], ["files that you may not read", "remove or move"]),
        (["a symbolic link, not a file", _FOREIGN], ["a run must not contain links; copy .*: cp -rL ./run COPY$"]),
        ([_LINK], ["remove or move files that do not belong to the run"]),
    ],
)
def test_every_kind_of_damage_comes_with_what_helps(problems, helps):
    damages = [Damage("file", None, None, None, None, problem) for problem in problems]
    for found, words in zip(what_helps(Path("run"), damages), helps, strict=True):
        assert re.match(words, found)

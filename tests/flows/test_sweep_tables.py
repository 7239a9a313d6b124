import io
from dataclasses import make_dataclass
from types import SimpleNamespace

import pytest
from rich.console import Console

from metaloom.flows.views import sweep_tables
from metaloom.flows.views.parts import fact_grid, new_table


def lines_of(renderable, **options) -> list[str]:
    out = io.StringIO()
    Console(file=out, **{"width": 200, **options}).print(renderable)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_runs_are_counted_by_state_and_those_that_are_not_planned_yet_wait():
    rows = [{"state": state} for state in ("complete", "failed", "complete")]
    assert sweep_tables.counted(rows, 3) == "6 runs: 3 waiting, 2 complete, 1 failed"
    assert sweep_tables.counted(rows[:1], 0) == "1 run: 1 complete"


def sweep_of(search=None, name="name"):
    return SimpleNamespace(
        search=search, keys=("lr", "size"), name=name, recipe="ppo", settings=("a=1",), num_runs=3, seeds=(1, 2)
    )


def test_a_sweep_has_a_row_for_each_run():
    row = {
        "run": "first", "settings": {"lr": "0.000123456789"}, "seed": 1, "iterations_done": 2, "iterations": 5,
        "last_return": 1.5, "state": "complete", "score": 0.25,
    }  # fmt: skip
    waiting = {
        **row,
        "run": "second",
        "settings": {"lr": "12345678", "size": "a"},
        "iterations": None,
        "last_return": None,
    }
    rows = [{**row, "writer": "process 7"}, {**waiting, "score": None, "state": "waiting"}]
    found = [" ".join(line.split()) for line in lines_of(sweep_tables.sweep_table(sweep_of(), rows))]
    assert [line for line in found if line.strip("- ")] == [
        "sweep name: ppo a=1",
        "run lr size seed iterations last return state",
        "first 0.0001235 1 2 / 5 1.5 complete (process 7)",
        "second 12345678 a 1 - waiting",
        "3 runs: 2 waiting, 1 complete",
    ]
    search = SimpleNamespace(metric="loss")
    found = [" ".join(line.split()) for line in lines_of(sweep_tables.sweep_table(sweep_of(search), rows))]
    assert [line for line in found if line.strip("- ")][1:4] == [
        "run lr size seed iterations last return score: loss state",
        "first 0.0001235 1 2 / 5 1.5 0.25 complete (process 7)",
        "second 12345678 a 1 - - waiting",
    ]


def trial(number, score):
    return SimpleNamespace(number=number, score=score, runs=(SimpleNamespace(settings=(("lr", "0.1"),)),), failed=False)


@pytest.mark.parametrize("length", [55, 56])
def test_the_best_trial_is_tested_with_seeds_that_are_new_under_a_name_that_is_short_enough(length, monkeypatch):
    sweep = sweep_of(SimpleNamespace(metric="loss"), "n" * length)
    monkeypatch.setattr(sweep_tables, "best_of", lambda trials: trials[1])
    best, command = sweep_tables.best_lines(sweep, [trial(0, None), trial(1, 0.5), trial(2, 1.0)])
    assert best == "best: trial 1 of 2 with a score, loss 0.5: --set lr=0.1"
    name = "n" * 55 + "-best"
    assert command == (
        f"test it with other seeds: metaloom sweep ppo --name {name} --seeds 3,4,5,6,7 --set a=1 --set lr=0.1"
    )
    monkeypatch.setattr(sweep_tables, "best_of", lambda trials: None)
    assert sweep_tables.best_lines(sweep, [])[0].startswith("no trial has a score yet; a score is loss averaged")
    monkeypatch.setattr(sweep_tables, "best_of", lambda trials: trial(1, None))
    assert sweep_tables.best_lines(sweep, [])[0].startswith("no trial has a score yet")
    assert sweep_tables.best_lines(sweep_of(), []) == []


def test_a_search_is_told_with_its_best_trial(monkeypatch):
    search = make_dataclass("Search", ["metric"])("loss")
    best = {"trial": 1, "score": 0.5, "settings": {"lr": "0.1"}}
    for found, told in ((trial(1, 0.5), best), (None, None)):
        monkeypatch.setattr(sweep_tables, "best_of", lambda trials, found=found: found)
        assert sweep_tables.search_info(sweep_of(search), []) == {"search": {"metric": "loss"}, "best": told}
    assert sweep_tables.search_info(sweep_of(), []) == {}


def test_numbers_longer_than_eight_characters_are_rounded():
    texts = ("0.123456", "0.1234567", "-1.25e-100", "long-text", "123456789")
    assert [sweep_tables._short(text) for text in texts] == [
        "0.123456",
        "0.1235",
        "−1.25e−100",
        "long-text",
        "123,456,789",
    ]


def test_a_column_is_dropped_just_before_prose_would_be_narrower_than_thirty():
    table = new_table("a", "b", rows=[("x", "word " * 20)], drop=("a",), prose=("b",))
    widths = [width for width in range(30, 45) if lines_of(table, width=width)[1].split() == ["a", "b"]]
    # Beside the prose there are one letter and five spaces.
    assert widths == [*range(30 + 1 + 5, 45)]
    assert " ".join(lines_of(table, width=36)[3:]).split() == ["x", *["word"] * 20]


def test_tables_have_the_same_rules_where_there_is_ascii_only():
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    Console(file=out, width=20).print(new_table("a", "b", rows=[("x", "y")]))
    out.seek(0)
    assert out.read().split() == ["a", "b", "-----", "x", "y"]


def test_values_of_facts_begin_two_columns_behind_the_longest_name():
    assert lines_of(fact_grid([("a", 1), ("name", "[b]")])) == ["a     1", "name  [b]"]

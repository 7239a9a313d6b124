"""The programs that draw the documentation's pictures."""

import runpy
import sys
from pathlib import Path

import pytest

from metaloom.flows import cli

PROGRAMS = sorted((Path(__file__).parents[2] / "docs" / "images").glob("*.py"))


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_a_program_imports_what_is_there_and_draws_only_when_it_is_run(program, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pictures = {path: path.stat().st_mtime_ns for path in program.parent.iterdir()}
    runpy.run_path(str(program), run_name="imported")
    assert {path: path.stat().st_mtime_ns for path in program.parent.iterdir()} == pictures
    assert [*tmp_path.iterdir()] == []


def test_the_graph_of_the_first_page_is_that_of_its_recipe(capsys):
    assert cli.run(["graph", "first-steps", "--format", "svg"]) == 0
    assert capsys.readouterr().out == (Path(__file__).parents[2] / "docs/images/graph.svg").read_text()


def test_the_pictures_of_the_documentation_take_no_more_than_three_megabytes():
    images = [path for path in (Path(__file__).parents[2] / "docs/images").iterdir() if path.suffix != ".py"]
    assert sum(path.stat().st_size for path in images) <= 3_000_000


def test_beliefs_are_drawn_of_a_short_run_without_evaluations(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = ("iterations=1", "num_tasks=2", "policy.hidden_sizes=[4]", "algorithm.model_updates=1")
    sizes = [part for setting in small for part in ("--set", setting)]
    assert cli.run(["train", "varibad-hidden-goal-grid", "--run", "search", "--workers", "0", *sizes]) == 0
    monkeypatch.setattr(sys, "argv", ["draw_varibad.py", ".", "search"])
    runpy.run_path(str(next(path for path in PROGRAMS if path.stem == "draw_varibad")), run_name="__main__")
    assert sorted(path.name for path in tmp_path.glob("*.png")) == ["varibad_belief.png"]


def test_the_half_cheetahs_picture_takes_runs_by_any_name_and_refuses_all_else(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    small = ("iterations=1", "num_tasks=2", "episodes_per_task=2", "max_episode_steps=4", "policy.hidden_sizes=[4]")
    sizes = [part for setting in small for part in ("--set", setting)]
    for recipe, name in (("rl2-navigation-2d", "remembers"), ("promp-point-corner", "adapts")):
        assert cli.run(["train", recipe, "--run", name, "--workers", "0", *sizes]) == 0

    def draw(*arguments):
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["draw_half_cheetah.py", *arguments])
        runpy.run_path(str(next(path for path in PROGRAMS if path.stem == "draw_half_cheetah")), run_name="__main__")

    for arguments, told in (
        (("nowhere", "--gru", "remembers"), "nowhere: no such folder"),
        ((".",), "no runs given"),
        ((".", "--gru", "remembers", "nothing"), "no such folder; expected an existing run folder"),
        ((".", "--promp", "remembers"), "remembers: no metric 'step_1.average_return'"),
    ):
        with pytest.raises(SystemExit) as ended:
            draw(*arguments)
        assert ended.value.code == 2
        assert told in capsys.readouterr().err
        assert [*tmp_path.glob("*.png")] == []
    draw(".", "--promp", "adapts", "--gru", "remembers")
    assert [path.name for path in tmp_path.glob("*.png")] == ["half_cheetah_memory.png"]

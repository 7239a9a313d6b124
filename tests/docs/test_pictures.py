"""The programs that draw the documentation's pictures."""

import runpy
import sys
from pathlib import Path

import pytest

from metaloom.flows import cli

PROGRAMS = sorted((Path(__file__).parents[2] / "docs" / "images").glob("*.py"))


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_everything_that_a_program_imports_is_there(program):
    runpy.run_path(str(program), run_name="imported")


def test_beliefs_are_drawn_of_a_short_run_without_evaluations(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = ("iterations=1", "num_tasks=2", "policy.hidden_sizes=[4]", "algorithm.model_updates=1")
    sizes = [part for setting in small for part in ("--set", setting)]
    assert cli.run(["train", "varibad-hidden-goal-grid", "--run", "search", "--workers", "0", *sizes]) == 0
    monkeypatch.setattr(sys, "argv", ["draw_varibad.py", ".", "search"])
    runpy.run_path(str(PROGRAMS[0]), run_name="__main__")
    assert sorted(path.name for path in tmp_path.glob("*.png")) == ["varibad_belief.png"]

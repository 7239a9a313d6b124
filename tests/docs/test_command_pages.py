"""The commands and the code in the pages about optimize, diff, export and debugging work, in the order of each page."""

import re
import shlex
from pathlib import Path

import duckdb
import pytest
from cyclopts import App

from metaloom.flows import cli
from metaloom.flows.commands.train import train
from metaloom.flows.rollouts.workers import Backend
from metaloom.pipeline.config.run import build_config

DOCS = Path(__file__).parents[2] / "docs"

pytestmark = pytest.mark.slow

CONFIG = {
    "env": {"name": "point-corner", "options": {"reward": "dense"}},
    "algorithm": {"name": "promp", "num_epochs": 1},
    "policy": {"hidden_sizes": [4]},
    "iterations": 13,
    "num_tasks": 4,
    "episodes_per_task": 2,
    "max_episode_steps": 5,
}


def page(name: str) -> str:
    return (DOCS / f"{name}.md").read_text(encoding="utf-8")


def blocks(name: str, language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```", page(name), flags=re.DOTALL | re.MULTILINE)
    return [text for kind, text in found if kind == language]


def commands(name: str) -> list[list[str]]:
    lines = [line for text in blocks(name, "") for line in text.splitlines()]
    return [shlex.split(line)[1:] for line in lines if line.startswith("metaloom ")]


@pytest.fixture
def here(tmp_path_factory, monkeypatch):
    """A folder with two short runs, first and second, in the working folder."""
    folder = tmp_path_factory.getbasetemp() / "command-pages"
    if not folder.exists():
        for name, seed in (("first", 1), ("second", 2)):
            train(build_config({**CONFIG, "seed": seed}), folder / "runs" / name, backend=Backend(workers=0))
    monkeypatch.chdir(folder)
    monkeypatch.delenv("METALOOM_RUNS", raising=False)
    return folder


@pytest.mark.parametrize(("name", "count"), [("counterfactuals", 5), ("export", 4)])
def test_every_command_and_block_of_a_page_runs(here, monkeypatch, name, count):
    monkeypatch.setenv("MINARI_DATASETS_PATH", "datasets")
    assert len(commands(name)) == count
    for command in commands(name):
        assert cli.run(command) == (1 if command[0] == "diff" else 0), command
    names: dict[str, object] = {}
    for block in blocks(name, "python"):
        exec(compile(block, name, "exec"), names)
    for query in blocks(name, "sql"):
        assert len(duckdb.sql(query).fetchall()) == 26


def test_the_code_of_the_debugging_page_runs(here):
    names: dict[str, object] = {}
    for block in blocks("debugging", "python"):
        exec(compile(block, "debugging", "exec"), names)
    assert (names["outcome"].fault, names["outcome"].identical) == (None, True)


def options(app: App, command: str) -> set[str]:
    return {
        name
        for argument in app[command].assemble_argument_collection()
        for name in argument.names
        if name.startswith("--") and not name.startswith("--no-")
    }


@pytest.mark.parametrize(("name", "command"), [("counterfactuals", "optimize"), ("export", "export")])
def test_the_table_of_a_page_lists_every_option_of_its_command(name, command):
    rows = re.findall(r"^\| `(--[a-z-]+)`", page(name), flags=re.MULTILINE)
    assert {*rows} == options(cli.app, command) - {"--run"}

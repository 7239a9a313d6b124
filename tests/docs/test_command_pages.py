"""The tables of the pages about optimize and export list the options that the commands have."""

import re
from pathlib import Path

import pytest
from cyclopts import App

from metaloom.flows import cli

DOCS = Path(__file__).parents[2] / "docs"


def options(app: App, command: str) -> set[str]:
    return {
        name
        for argument in app[command].assemble_argument_collection()
        for name in argument.names
        if name.startswith("--") and not name.startswith("--no-")
    }


@pytest.mark.parametrize(("name", "command"), [("counterfactuals", "optimize"), ("export", "export")])
def test_the_table_of_a_page_lists_every_option_of_its_command(name, command):
    rows = re.findall(r"^\| `(--[a-z-]+)`", (DOCS / f"{name}.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert {*rows} == options(cli.app, command) - {"--run"}

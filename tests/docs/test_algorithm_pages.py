"""The pages of docs/algorithms against the code: algorithms and recipes."""

import re
from pathlib import Path

import pytest

from metaloom.flows.recipes import RECIPES
from metaloom.pipeline.algorithms import ALGORITHMS as REGISTRY
from metaloom.pipeline.plugins import load

PAGES = Path(__file__).parents[2] / "docs" / "algorithms"

ALGORITHMS = {name: load(path) for name, path in REGISTRY.builtin.items()}


def page(name: str) -> str:
    return (PAGES / f"{name.replace('-', '_')}.md").read_text()


def test_the_index_names_every_algorithm():
    rows = re.findall(r"^\| `([\w-]+)` .* \[.+\]\((\w+)\.md\) \|$", page("README"), re.MULTILINE)
    assert dict(rows) == {name: name.replace("-", "_") for name in ALGORITHMS}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_pages_show_a_recipe_that_exists(name):
    commands = re.findall(r"metaloom train (\S+)", page(name))
    assert commands
    assert set(commands) <= set(RECIPES)

"""The pages of docs/algorithms against the code: options with their defaults, metrics, links."""

import re
from pathlib import Path

import pytest
import yaml

from metaloom.flows.recipes import RECIPES
from metaloom.pipeline.algorithms import ALGORITHMS as REGISTRY
from metaloom.pipeline.plugins import load

PAGES = Path(__file__).parents[2] / "docs" / "algorithms"

ALGORITHMS = {name: load(path) for name, path in REGISTRY.builtin.items()}


def page(name: str) -> str:
    return (PAGES / f"{name.replace('-', '_')}.md").read_text()


def section(text: str, title: str) -> str:
    return text.split(f"\n## {title}\n")[1].split("\n## ")[0]


def options_of(text: str) -> dict[str, str]:
    """The options of the first table; later tables of the section are about other settings."""
    table = section(text, "Options").strip().split("\n\n")[0]
    return dict(re.findall(r"^\| `(\w+)` \| ([^|]+?) \|", table, re.MULTILINE))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_options_and_their_defaults_are_those_of_the_code(name):
    fields = {key: field for key, field in ALGORITHMS[name].model_fields.items() if key != "name"}
    documented = options_of(page(name))
    assert set(documented) == set(fields)
    for option, text in documented.items():
        default = fields[option].default
        if isinstance(default, float):
            assert float(text) == default, option
        else:
            default = getattr(default, "name", list(default) if isinstance(default, tuple) else default)
            assert yaml.safe_load(text) == default, option


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_option_is_described_in_the_schema(name):
    properties = ALGORITHMS[name].model_json_schema()["properties"]
    assert [key for key, field in properties.items() if key != "name" and not field.get("description")] == []


@pytest.mark.parametrize("name", [*ALGORITHMS, "README"])
def test_links_between_pages_lead_somewhere(name):
    for target in re.findall(r"\]\((?!http)([^)]+)\)", page(name)):
        file, _, anchor = target.partition("#")
        assert (PAGES / file).exists(), target
        text = (PAGES / file).read_text() if anchor else ""
        titles = [re.sub(r"[^\w -]", "", line.lstrip("# ").lower()).replace(" ", "-") for line in text.splitlines()]
        assert not anchor or anchor in titles, target


def test_the_index_names_every_algorithm():
    assert set(re.findall(r"^\| `([\w-]+)`", page("README"), re.MULTILINE)) == set(ALGORITHMS)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_pages_show_a_recipe_that_exists(name):
    commands = re.findall(r"metaloom train (\S+)", page(name))
    assert commands
    assert set(commands) <= set(RECIPES)

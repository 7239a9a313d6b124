"""The settings page, which the documentation's site fills from the schemas."""

import json
import re
import runpy
from pathlib import Path

import pytest
from pydantic_core import to_jsonable_python

from metaloom.pipeline.algorithms import ALGORITHMS
from metaloom.pipeline.config.run import RunConfig
from metaloom.pipeline.plugins import load
from metaloom.pipeline.schema import Settings

DOCS = Path(__file__).parents[2] / "docs"
GOLDEN = Path(__file__).parents[1] / "golden" / "settings.json"
LIMITS = {"default", "later", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minItems", "minLength"}


@pytest.fixture(scope="module")
def page():
    hooks = runpy.run_path(str(DOCS / "site_hooks.py"))
    return hooks["on_page_markdown"]((DOCS / "settings.md").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def sections(page):
    """One dictionary per section: default and description by field."""
    row = re.compile(r"^\| `(?:[\w.]+\.)?(\w+)` \| .+? \| `(.*?)` \| (.*) \|$", re.MULTILINE)
    return [{name: (default, about) for name, default, about in row.findall(part)} for part in page.split("\n## ")]


def schemas(cls=Settings):
    """Yield the classes of settings that are no part of others; those that other tests define are not ours."""
    ours = [below for below in cls.__subclasses__() if below.__module__.startswith("metaloom.pipeline")]
    for below in ours:
        yield from schemas(below)
    if cls is not Settings and not ours:
        yield cls


def default_of(field):
    """A field's default as the page shows it."""
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True)
    if isinstance(default, Settings):
        return getattr(default, "name", None) or "see its section"
    return default if isinstance(default, str) else json.dumps(to_jsonable_python(default))


def test_every_field_of_every_schema_is_listed_with_its_default(sections):
    assert {load(path) for path in ALGORITHMS.builtin.values()} <= {*schemas()}
    for cls in schemas():
        defaults = {name: default_of(field) for name, field in cls.model_fields.items()}
        assert defaults in [{name: default for name, (default, _) in section.items()} for section in sections], cls


def test_every_setting_is_described(sections):
    assert [name for section in sections for name, (_, about) in section.items() if not about] == []


def test_what_an_algorithm_changes_in_other_sections_is_listed(page):
    for name, path in ALGORITHMS.builtin.items():
        assert bool(load(path)().run_defaults) == (f"under {name}: `" in page)


def limits_of(schema):
    """The default and the limits in a field's JSON schema, also of what a list contains or of one of two types."""
    inner = [schema.get("items", {}), *schema.get("anyOf", ())]
    return {key: value for part in (*inner, schema) for key, value in part.items() if key in LIMITS}


def test_no_default_and_no_limit_has_moved():
    # Runs that lack a setting are read with its default, and digests of settings omit what an earlier version did.
    # A change that is meant to move one replaces its line in the table.
    found = {}
    assert {RunConfig, *(load(path) for path in ALGORITHMS.builtin.values())} <= {*schemas()}
    for cls in schemas():
        for name, schema in cls.model_json_schema()["properties"].items():
            owner = next(base for base in cls.__mro__ if name in vars(base).get("__annotations__", ()))
            if "$ref" not in schema:  # a section, which has lines of its own
                found[f"{owner.__name__}.{name}"] = limits_of(schema)
    for path in ALGORITHMS.builtin.values():
        found[f"{load(path).__name__}, of the run"] = {"default": to_jsonable_python(load(path)().run_defaults)}
    assert found == json.loads(GOLDEN.read_text(encoding="utf-8"))

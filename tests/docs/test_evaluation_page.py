"""docs/evaluation.md lists the settings there are, with their defaults."""

import re
from pathlib import Path

from metaloom.flows.cli import app
from metaloom.pipeline.config.sections import EvaluationConfig

PAGE = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text(encoding="utf-8")


def test_every_setting_is_listed_with_its_default():
    (table,) = re.findall(r"\| setting \| default \| \|\n\| --- \| --- \| --- \|\n((?:\|.*\n)+)", PAGE)
    listed = dict(re.findall(r"^\| `(\w+)` \| `?([\w-]+)`? \|", table, flags=re.MULTILINE))
    defaults = {name: field.default for name, field in EvaluationConfig.model_fields.items()}
    words = {None: "null", False: "false"}
    assert listed == {
        name: words.get(value, str(value)) if value != 0 or value is False else "0" for name, value in defaults.items()
    }


def test_every_setting_but_every_is_an_option_of_the_command():
    options = {name for argument in app["evaluate"].assemble_argument_collection() for name in argument.names}
    for name in EvaluationConfig.model_fields:
        assert (f"--{name.replace('_', '-')}" in options) == (name != "every"), name

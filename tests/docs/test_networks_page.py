"""docs/networks.md against the code."""

import re
from pathlib import Path

import yaml

from metaloom.pipeline.nn.cells import AttentionOptions
from metaloom.pipeline.nn.spec import SIZED_NETWORKS, ConvolutionOptions
from metaloom.pipeline.policies.config import PolicyConfig

PAGE = (Path(__file__).parents[2] / "docs" / "networks.md").read_text()


def test_options_and_their_defaults_are_those_of_the_code():
    documented = dict(re.findall(r"^\| `(\w+)` \| ([^|]+?) \|", PAGE, re.MULTILINE))
    assert documented.keys() == PolicyConfig.model_fields.keys()
    defaults = PolicyConfig().model_dump(mode="json")
    assert {name: yaml.safe_load(text) for name, text in documented.items()} | {"min_std": 1e-6} == defaults


def test_built_in_networks_and_their_options_are_described():
    assert set(re.findall(r"^- \*\*([\w-]+)\*\*", PAGE, re.MULTILINE)) == set(SIZED_NETWORKS)
    for name, field in (ConvolutionOptions.model_fields | AttentionOptions.model_fields).items():
        default = field.default
        shown = str(list(default)) if isinstance(default, tuple) else str(default).lower()
        assert re.search(rf"`{name}` \({re.escape(shown)}", PAGE), name

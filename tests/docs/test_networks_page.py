"""docs/networks.md against the code."""

import re
from pathlib import Path

from metaloom.pipeline.nn.cells import AttentionOptions
from metaloom.pipeline.nn.spec import SIZED_NETWORKS, ConvolutionOptions

PAGE = (Path(__file__).parents[2] / "docs" / "networks.md").read_text()


def test_built_in_networks_and_their_options_are_described():
    assert set(re.findall(r"^- \*\*([\w-]+)\*\*", PAGE, re.MULTILINE)) == set(SIZED_NETWORKS)
    for name, field in (ConvolutionOptions.model_fields | AttentionOptions.model_fields).items():
        default = field.default
        shown = str(list(default)) if isinstance(default, tuple) else str(default).lower()
        assert re.search(rf"`{name}` \({re.escape(shown)}", PAGE), name

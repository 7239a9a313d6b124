"""The diagrams in docs/concepts.md are what `metaloom graph` prints."""

import re
import shlex
from pathlib import Path

from metaloom.flows.cli import run

PAGE = (Path(__file__).parents[2] / "docs" / "concepts.md").read_text(encoding="utf-8")


def test_every_diagram_is_what_the_command_before_it_prints(capsys):
    found = re.findall(r"`metaloom (graph [^`]*)`[^`]*(?:`[^`]*`[^`]*)*?```\w*\n(.*?)```", PAGE, flags=re.DOTALL)
    assert len(found) == 1
    for command, shown in found:
        assert run(shlex.split(command)) == 0
        assert capsys.readouterr().out == shown

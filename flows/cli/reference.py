"""`metaloom reference`: a group of commands."""

from typing import Any

from cyclopts import App

from metaloom.flows.cli.generated import Call, make_command
from metaloom.flows.cli.output import answer
from metaloom.flows.operations import REFERENCE
from metaloom.flows.operations.reference import found

reference: App = App(
    name="reference",
    help="""List, show, verify, extract or add reference runs.

    Anybody can compute every iteration of a reference run again.

    Example: `metaloom reference ls`
    """,
)


def show(call: Call[Any], *, as_json: bool = False) -> int:
    """Print a reference as data or drawn, while its archive is open."""
    with found(call["name"], call["folder"]) as views:
        answer(as_json, *views)
    return 0


for _operation in REFERENCE:
    reference.command(make_command(_operation), name=_operation.name)

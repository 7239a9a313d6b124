"""The commands of `metaloom reference`."""

from typing import Any

from cyclopts import App

from metaloom.flows.cli.generated import Call, make_command
from metaloom.flows.cli.output import answer
from metaloom.flows.operations import REFERENCE, late
from metaloom.flows.operations.reference import found

reference: App = App(
    name="reference",
    help="""List, show, verify, extract or add reference runs.

    Anyone can recompute every iteration of a reference run.

    Example: `metaloom reference ls`
    """,
)


def show(call: Call[Any], *, as_json: bool) -> int:
    """Print a reference as JSON data or as formatted text, while its archive is open."""
    with found(call["name"], call["folder"]) as views:
        answer(as_json, *views)
    return 0


def verify(call: Call[Any], *, as_json: bool) -> int:
    """Verify a reference, using its recorded CPU code paths, and print the result."""
    return call.show(call(prepared=late.start_as_recorded), as_json)


for _operation in REFERENCE:
    reference.command(make_command(_operation), name=_operation.name)

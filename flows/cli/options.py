"""Options that only commands have."""

from typing import Annotated

from cyclopts import Parameter

AsJson = Annotated[bool, Parameter(name="--json", negative=(), show_default=False, help="Print JSON instead of text.")]
Repeated = Annotated[tuple[str, ...], Parameter(negative=(), show_default=False)]

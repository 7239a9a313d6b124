"""Rows of `ls`."""

from collections.abc import Mapping
from typing import Any

Row = Mapping[str, Any]


class Rows(list[Row]):
    """Rows of a list of runs.

    Attributes:
        nothing: Says why there are none.
    """

    nothing = ""

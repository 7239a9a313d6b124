"""Lazy imports, and the entry points of installed packages.

Help texts, listings and errors should not wait seconds for torch. A module with slow imports lists them under
`TYPE_CHECKING`, for editors and type checkers, and otherwise sets `__getattr__ = lazily(__name__)`.
"""

import ast
import gc
import sys
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any


def installed(group: str) -> list[EntryPoint]:
    """Return a group's entry points, sorted by name. Installed packages are searched only once."""
    return sorted(_search(tuple(sys.path)).select(group=group), key=lambda point: point.name)


@cache
def _search(path: tuple[str, ...]):
    del path
    return entry_points()


def lazily(module: str) -> Callable[[str], Any]:
    """Return a module `__getattr__` that imports a name listed under `TYPE_CHECKING` on first use."""

    def found(name: str) -> Any:
        if (place := lazy_names(module).get(name)) is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        collects = gc.isenabled()
        gc.disable()  # imports leave no garbage, and collection takes a tenth of the import time
        try:
            return getattr(import_module(place[0]), place[1])
        finally:
            if collects:
                gc.enable()

    return found


@cache
def lazy_names(module: str) -> Mapping[str, tuple[str, str]]:
    """Return a module's imports under `TYPE_CHECKING`, keyed by name: the module, and the name in that module."""
    tree = ast.parse(Path(str(import_module(module).__file__)).read_text("utf-8"))
    parts = [node for node in tree.body if isinstance(node, ast.If)]
    lines = [line for part in parts if ast.unparse(part.test) == "TYPE_CHECKING" for line in part.body]
    imports = [line for line in lines if isinstance(line, ast.ImportFrom)]
    return {name.asname or name.name: (str(line.module), name.name) for line in imports for name in line.names}

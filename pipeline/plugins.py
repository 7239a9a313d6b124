"""Plug-ins: classes and functions named in a configuration.

A name is a built-in name, module:Class, or an entry point of an installed package. Only this module imports what a
configuration names.
"""

import functools
import importlib
import importlib.machinery
import importlib.util
import inspect
import os
import site
import sys
import sysconfig
import traceback
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from metaloom.pipeline.lazy import installed
from metaloom.pipeline.shown import ConfigError, suggestion

T = TypeVar("T")

INSTALLED = "installed"


@dataclass(frozen=True, eq=False)
class Plugins:
    """Registry of plug-ins of one kind."""

    kind: str  # noun for messages, such as "algorithm"
    group: str  # entry point group, such as "metaloom.algorithms"
    builtin: Mapping[str, str]  # module:Class, imported on use, keyed by name

    def names(self) -> list[str]:
        """Return the built-in names, followed by the names that installed packages provide."""
        return [*self.builtin, *(name for name in self._installed() if name not in self.builtin)]

    def path(self, name: str) -> str:
        """Return the path, module:Class, of the plug-in with this name, or raise ConfigError if the name is unknown."""
        if name in self.builtin:
            return self.builtin[name]
        if ":" in name:
            return name
        if (path := self._installed().get(name)) is not None:
            return path
        names, kind = self.names(), a_or_an(self.kind)
        known, hint = f"one of {', '.join(names)}; or " if names else "", suggestion(name, names)
        raise ConfigError(
            f"got {name!r}{hint}{' Expected' if hint else '; expected'} {known}module:Class for {kind}, or a name "
            f"among the entry points {self.group} of an installed package"
        )

    def find(self, name: str, base: type[T]) -> type[T]:
        """Import and return the plug-in class with this name, which must be a subclass of `base`."""
        return load_class(self.path(name), base, name)

    def _installed(self) -> dict[str, str]:
        return {point.name: point.value for point in installed(self.group)}


def load(path: str) -> Any:
    """Return the object at a path, module:Class, or raise ConfigError if this or another process cannot import it."""
    name = path.partition(":")[2]
    if "<" in name:
        raise ConfigError(_not_found_again(path))
    try:
        return functools.reduce(getattr, name.split("."), import_module(path))
    except AttributeError as problem:
        raise ConfigError(_not_found(path, problem)) from problem


def load_class(path: str, base: type[T], name: str | None = None) -> type[T]:
    """Import and return the class at a path, module:Class, or raise ConfigError if it is not a subclass of `base`."""
    found = load(path)
    # Search the MRO, since issubclass does not accept a Protocol and runs the class's own code.
    if not (inspect.isclass(found) and base in found.__mro__):
        raise ConfigError(f"got {name or path!r}, which is {_kind_of(found)}; expected a subclass of {path_of(base)}")
    return cast(type[T], found)


def import_module(path: str) -> types.ModuleType:
    """Return the module of a path, module:Class, or raise ConfigError if this or another process cannot import it."""
    module = path.partition(":")[0]
    if module == "__main__":
        raise ConfigError(_not_found_again(path))
    # A user's module is in the current folder, which an installed command does not search. Do not add the folder for
    # Metaloom's own modules: entry points in it must not count as installed.
    if not module.startswith("metaloom.") and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return importlib.import_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as problem:  # a module may also end the program, or skip itself as a test does
        missing = isinstance(problem, ModuleNotFoundError) and f"{module}.".startswith(f"{problem.name}.")
        raise ConfigError((_raised if module and not missing else _not_found)(path, problem)) from problem


def place_of(module: str) -> str | None:
    """Return the file of a module's top-level package, or its folders if it has no file, without importing it.

    Returns INSTALLED for modules of the interpreter or of installed packages, and None if the package does not exist.
    """
    name = module.partition(".")[0]
    try:
        spec = importlib.util.find_spec(name) or importlib.machinery.PathFinder.find_spec(name, [os.getcwd()])
    except (ImportError, ValueError):  # not a valid module name, or a module without a file such as __main__
        return None
    if spec is None:
        return None
    files = [spec.origin] if spec.has_location and spec.origin else [*(spec.submodule_search_locations or ())]
    if not files or is_installed(files[0]):
        return INSTALLED
    return os.pathsep.join(os.path.realpath(file) for file in files)


def is_installed(file: str) -> bool:
    """Return True if a file belongs to the interpreter or an installed package."""
    return not _installed_in().isdisjoint(Path(os.path.realpath(file)).parents)


@functools.cache
def _installed_in() -> frozenset[Path]:
    """Return the folders of the interpreter and of installed packages."""
    folders = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders += [*site.getsitepackages(), site.getusersitepackages()]
    return frozenset(Path(os.path.realpath(folder)) for folder in folders)


def _not_found(path: str, problem: BaseException) -> str:
    return (
        f"got {path!r}: {type(problem).__name__}: {problem}; expected module:Class (module:function for a metric "
        f"or recipe, module:NAME for a graph or export format), with the module in {os.getcwd()} or installed"
    )


def _raised(path: str, problem: BaseException) -> str:
    """Return a message about the error that a module raised on import, with the innermost line outside libraries."""
    if isinstance(problem, ConfigError):  # the message already describes incompatible stages
        return f"the module of {path!r} cannot be imported: {problem}"
    lines = reversed(traceback.extract_tb(problem.__traceback__))
    own = (f for f in lines if f.filename != __file__ and f.filename[0] != "<" and not is_installed(f.filename))
    at = next((f" in {f.filename}, line {f.lineno}" for f in own), "")
    return (
        f"importing the module of {path!r} raised {type(problem).__name__}{at}: {problem}; the module must be "
        "importable"
    )


def _not_found_again(path: str) -> str:
    return (
        f"{path!r} exists only in this process, so the run could not be continued or replayed; use "
        "a class at the top level of a module that can be imported"
    )


def path_of(found: Callable[..., object]) -> str:
    """Return the path of a class or function, such as module:Class."""
    return f"{found.__module__}:{found.__qualname__}"


def _kind_of(found: object) -> str:
    if inspect.isclass(found):
        return f"the class {path_of(found)}"
    return "a function" if isinstance(found, types.FunctionType) else a_or_an(type(found).__name__)


def a_or_an(noun: str) -> str:
    """Return a noun preceded by its indefinite article."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"

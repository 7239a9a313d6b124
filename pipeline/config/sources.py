"""Source files of plug-ins, and their digests. Workers import this module, so it does not import torch."""

import ast
import hashlib
import inspect
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from metaloom.pipeline.algorithms.contract import AlgorithmSettings
from metaloom.pipeline.config.run import RunConfig
from metaloom.pipeline.envs.config import EnvConfig, is_gymnasium_id, registered_id
from metaloom.pipeline.envs.facts import class_path
from metaloom.pipeline.estimation.diagnostics import METRICS
from metaloom.pipeline.nn.spec import NETWORKS
from metaloom.pipeline.plugins import INSTALLED, import_module, is_installed, load, path_of, place_of
from metaloom.pipeline.policies.config import POLICIES, PolicyConfig
from metaloom.pipeline.schema import ConfigError, PluginSettings, Settings

_KNOWN_BY_VERSION = ("metaloom.", "gymnasium.")


def acting_paths(env: EnvConfig, policy: PolicyConfig) -> list[str]:
    """Return the environment's name, and the paths of its class, wrappers, networks and any custom policy."""
    own_policy = [POLICIES.path(policy.name)] if policy.name else []
    wrappers = [wrapper.path for wrapper in env.wrappers]
    networks = [policy.network, *([policy.encoder.name] if policy.encoder else [])]
    return [env.name, class_path(env), *wrappers, *map(NETWORKS.path, networks), *own_policy]


def sources_of(paths: Iterable[str]) -> dict[str, str]:
    """Return the SHA-256 of each file in `files_of`, with the same keys.

    Raises ConfigError if a file has changed since this process first read it or last reloaded its module.
    """
    digests: dict[str, str] = {}
    for name, file in files_of(paths).items():
        digests[name] = digest_of(file)
        if digests[name] != digest_first_read(name, file):
            raise ConfigError(
                f"{file} has changed since this process imported {name}; restart Python or call "
                "importlib.reload(module), because the run would record a source that it does not use"
            )
    return digests


_first_read: dict[Path, tuple[object, str]] = {}
"""The module's spec, which a reload replaces, and the digest at the first read, keyed by file."""


def digest_first_read(name: str, file: Path) -> str:
    """Return the SHA-256 that a plug-in's file had when this process first read it or last reloaded its module.

    `name` is a key of `files_of`. The module keeps using that code, whatever the file contains now.
    """
    spec = getattr(sys.modules.get(name.partition(":")[0]), "__spec__", None)
    if spec is None:  # not imported yet, so this process uses whatever the file contains then
        return digest_of(file)
    if file not in _first_read or _first_read[file][0] is not spec:
        _first_read[file] = (spec, digest_of(file))
    return _first_read[file][1]


def loaded_sources(paths: Iterable[str]) -> dict[str, str]:
    """Return the SHA-256 of the sources that this process uses, whatever their files contain now; see `files_of`."""
    return {name: digest_first_read(name, file) for name, file in files_of(paths).items()}


def digest_of(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def own_paths(paths: Iterable[str]) -> list[str]:
    """Return the paths that neither Metaloom nor gymnasium provides, sorted."""
    return sorted({p for p in paths if ":" in p and not p.replace(":", ".").startswith(_KNOWN_BY_VERSION)})


def files_of(paths: Iterable[str]) -> dict[str, Path]:
    """Return the source files of plug-ins, keyed by module:Class, and of their helper modules, keyed by module name.

    Helpers are modules that a plug-in imports, directly or indirectly, from its folder or, if installed, from its
    package. For an environment with a gymnasium id, they include the module that registers it.
    """
    files: dict[str, Path] = {}
    helpers: dict[str, Path] = {}
    for path in own_paths(paths):
        module, file = _written_in(path)
        if file is not None:
            files[path] = file
            helpers |= _modules_beside(file, module)
        named = path.partition(":")[0]
        if module != named and (source := _source_file(import_module(path), path)):  # it may alter what it imports
            helpers |= _modules_beside(source, named)
    of_plugins = {*files.values()}
    return files | {name: file for name, file in helpers.items() if file not in of_plugins}


def _written_in(path: str) -> tuple[str, Path | None]:
    """Return the module and the file that define module:Class. The file is None for code that is not Python."""
    found = import_module(path) if is_gymnasium_id(path) or registered_id(path) else load(path)
    # Objects such as a Graph do not record where they were made.
    has_file = inspect.isclass(found) or inspect.isfunction(found)
    module = found.__module__ if has_file else path.partition(":")[0]
    return module, _source_file(found if has_file else import_module(path), path)


def _source_file(found: Any, path: str) -> Path | None:
    try:
        file = inspect.getsourcefile(found)
    except TypeError:
        return None
    if file is not None and not Path(file).is_file():
        raise ConfigError(
            f"{file}, from which {path} was imported, no longer exists; a run records the digest of this file, so "
            "restore it or restart Python"
        )
    return None if file is None else Path(file).resolve()


def _modules_beside(file: Path, module: str) -> dict[str, Path]:
    """Return the files of modules in the same folder or package that a module imports, directly or indirectly.

    Imports are read from source files, not from loaded modules, so every process finds the same ones.
    """
    root = file.parents[module.count(".") + (file.name == "__init__.py")]
    package = module.partition(".")[0] if is_installed(str(file)) else None
    known: dict[str, Path] = {}
    waiting = [(module, file)]
    while waiting:
        for name in _imports(*waiting.pop()):
            if package not in (None, name.partition(".")[0]) or name in known:
                continue
            stem = root.joinpath(*name.split("."))
            files = (stem / "__init__.py", stem.with_name(f"{stem.name}.py"))
            found = next((file for file in files if file.is_file()), None)
            # Modules in a user's folder, not installed packages or Metaloom's own checkout.
            is_own = not f"{name}.".startswith(_KNOWN_BY_VERSION) and place_of(name) != INSTALLED
            if found is not None and (package or is_own):
                known[name] = found
                waiting.append((name, found))
    return known


def _imports(module: str, file: Path) -> Iterator[str]:
    """Yield the names of modules that a file may import, and of their parent packages."""
    try:
        tree = ast.parse(file.read_bytes())
    except SyntaxError:  # such a file may be imported only under some condition
        return
    package = module.split(".")[: None if file.name == "__init__.py" else -1]
    for node in ast.walk(tree):
        names = [module] if node is tree else []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            names = [f"{base}.{alias.name}" if base else alias.name for alias in node.names]
        for name in names:
            parts = name.split(".")
            yield from (".".join(parts[:n]) for n in range(1, len(parts) + 1))


def plugin_sources(config: RunConfig) -> dict[str, str]:
    """Return the SHA-256 of each source file of a run's plug-ins; see `sources_of`."""
    return sources_of(plugin_paths(config))


def plugin_paths(config: RunConfig) -> list[str]:
    """Return the paths of all classes and functions that a run's settings name, as module:Class for plug-ins."""
    metrics = (METRICS.path(name) for name in config.metrics)
    return [*acting_paths(config.env, config.policy), *metrics, *_classes(config)]


def changed_sources(now: Mapping[str, str], then: Mapping[str, object]) -> list[str]:
    """Return a message for each source whose digest differs from its digest in `then`.

    A message lists all plug-ins with the same two digests, such as those in one file. Helpers that are gone or new are
    included if `now` and `then` have the same plug-ins.
    """
    names = defaultdict[tuple[str, str], list[str]](list)
    for name, before in then.items():
        if isinstance(before, str) and (found := now.get(name, before)) != before:
            names[before, found].append(name)
    changes = [
        f"the source of {', '.join(plugins)} had the SHA-256 {before[:12]}..., now {found[:12]}..."
        for (before, found), plugins in names.items()
    ]
    if {name for name in now if ":" in name} == {name for name in then if ":" in name}:  # such names are plug-ins
        changes += [f"the source of {name} is gone" for name in then if name not in now]
        changes += [f"the source of {name} is new" for name in now if name not in then]
    return changes


def _classes(settings: Settings) -> Iterator[str]:
    """Yield the paths of settings classes selected by name, and of their learners, graphs and networks."""
    for value in dict(settings).values():
        if isinstance(value, PluginSettings):
            yield path_of(type(value))
        if isinstance(value, AlgorithmSettings):
            yield from (value.learner, value.graph, *(NETWORKS.path(name) for name in value.networks))
        if isinstance(value, Settings):
            yield from _classes(value)

"""The files of plug-ins, by digest, as any process finds them. Workers import this module: no torch."""

import ast
import hashlib
import inspect
from collections.abc import Iterable, Iterator
from pathlib import Path

from metaloom.pipeline.envs.config import EnvConfig, is_gymnasium_id, registered_id
from metaloom.pipeline.envs.facts import class_path
from metaloom.pipeline.nn.spec import NETWORKS
from metaloom.pipeline.plugins import INSTALLED, import_module, is_installed, load, place_of
from metaloom.pipeline.policies.config import POLICIES, PolicyConfig
from metaloom.pipeline.schema import ConfigError

_KNOWN_BY_VERSION = ("metaloom.", "gymnasium.")


def acting_paths(env: EnvConfig, policy: PolicyConfig) -> list[str]:
    """Return the environment, its wrappers, the network and the policy, as module:Class where they are custom."""
    own_policy = [POLICIES.path(policy.name)] if policy.name else []
    wrappers = [wrapper.path for wrapper in env.wrappers]
    networks = [policy.network, *([policy.encoder.name] if policy.encoder else [])]
    return [env.name, class_path(env), *wrappers, *map(NETWORKS.path, networks), *own_policy]


def sources_of(paths: Iterable[str]) -> dict[str, str]:
    """Return the SHA-256 of the files of plug-ins, as `files_of` finds them."""
    return {name: digest_of(file) for name, file in files_of(paths).items()}


def digest_of(file: Path) -> str:
    """Return the SHA-256 of a file as it is now."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def own_paths(paths: Iterable[str]) -> set[str]:
    """Return what of `paths` is known neither by our version nor by gymnasium's."""
    return {path for path in paths if ":" in path and not path.replace(":", ".").startswith(_KNOWN_BY_VERSION)}


def files_of(paths: Iterable[str]) -> dict[str, Path]:
    """Return the file of every plug-in among `paths`, by module:Class, and of modules beside it, by module.

    Modules count that the plug-in's file imports, or those import, and that lie in the same folder or below it; of an
    installed plug-in, in the same package. An environment by a gymnasium id counts with the module that registers it,
    whose file may be all that defines its class and its options.
    """
    own = own_paths(paths)
    files: dict[str, Path] = {}
    helpers: dict[str, Path] = {}
    for path in sorted(own):
        module, file = _written_in(path)
        if file is not None:
            files[path] = file
            helpers |= _modules_beside(file, module)
    of_plugins = {*files.values()}
    return files | {name: file for name, file in sorted(helpers.items()) if file not in of_plugins}


def _written_in(path: str) -> tuple[str, Path | None]:
    """Return the module and the file in which module:Class is defined; None for code that is not Python.

    Raises:
        ConfigError: the file is gone.
    """
    found = import_module(path) if is_gymnasium_id(path) or registered_id(path) else load(path)
    # An object, such as a Graph, does not record where it was made.
    tells = inspect.isclass(found) or inspect.isfunction(found)
    module = found.__module__ if tells else path.partition(":")[0]
    try:
        file = inspect.getsourcefile(found if tells else import_module(path))
    except TypeError:
        return module, None
    if file is None:
        return module, None
    if not Path(file).is_file():
        raise ConfigError(
            f"found no {file} any more, from which {path} was imported; required what a run's records are to tell of: "
            "put it back, or start Python again where it is now"
        )
    return module, Path(file).resolve()


def _modules_beside(file: Path, module: str) -> dict[str, Path]:
    """Return the files of the modules in a module's folder or package that it imports, in turn, by name.

    Read from the sources, not from what happens to be imported by now, so that every process finds the same ones.
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
            # Modules of a user's folder, not packages that are installed, such as ours from its own repository.
            is_own = not f"{name}.".startswith(_KNOWN_BY_VERSION) and place_of(name) != INSTALLED
            if found is not None and (package or is_own):
                known[name] = found
                waiting.append((name, found))
    return known


def _imports(module: str, file: Path) -> Iterator[str]:
    """Yield names that modules imported by a file may have, with the packages that they are in."""
    try:
        tree = ast.parse(file.read_bytes())
    except SyntaxError:  # of a file that is imported only under conditions
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

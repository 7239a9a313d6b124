"""Recipes: named settings that differ from the algorithm's defaults, with their origin.

Each entry in a YAML file in this folder is a recipe. `like` names another recipe of this package that provides unset
values; a different algorithm replaces all algorithm settings. Functions in other packages are also recipes if they are
entry points in the group metaloom.recipes.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from metaloom.pipeline.config.input import ConfigError, load_config, override
from metaloom.pipeline.config.yaml import parse
from metaloom.pipeline.envs import ENVS
from metaloom.pipeline.envs.config import step_limits_left_open
from metaloom.pipeline.nn.spec import SIZED_NETWORKS
from metaloom.pipeline.plugins import Plugins, load
from metaloom.pipeline.shown import suggestion

if TYPE_CHECKING:
    from metaloom.pipeline.config.run import RunConfig


@cache
def _entries() -> dict[str, str]:
    """Return the YAML text of each recipe, keyed by name. Recipes are parsed only when used, which is faster."""
    files = [file.read_text("utf-8") for file in Path(__file__).parent.glob("*.yaml")]
    entries = (entry for file in files for entry in re.split(r"^(?=[a-z])", file, flags=re.MULTILINE)[1:])
    return dict(sorted((entry.partition(":")[0], entry) for entry in entries))


@dataclass(frozen=True)
class Recipe:
    """Built-in recipe: a description with the origin of its settings, and the settings as in a settings file."""

    about: str
    settings: Mapping[str, Any]

    @classmethod
    def named(cls, name: str) -> "Recipe":
        """Return the recipe with this name, merged with the recipe named by its `like`."""
        entry = cast(dict[str, Any], cast(dict[str, Any], parse(_entries()[name]))[name])
        about, like = entry.pop("about"), entry.pop("like", None)
        return cls(about, _merged(cls.named(like).settings, entry) if like else entry)

    def __call__(self) -> "RunConfig":
        from metaloom.pipeline.config.run import build_config

        return build_config(self.settings)


def _merged(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with changes merged into them, section by section."""
    merged = dict(settings)
    for name, value in changes.items():
        before = settings.get(name)
        if isinstance(before, Mapping) or isinstance(value, Mapping):
            # A bare name stands for a section with that name and default settings.
            before, now = ({"name": of} if isinstance(of, str) else of or {} for of in (before, value))
            if name == "algorithm" and now.get("name", before["name"]) != before["name"]:
                before = {}
            merged[name] = _merged(before, now)
        else:
            merged[name] = value
    return merged


class Recipes(Mapping[str, "Callable[[], RunConfig]"]):
    """Recipes keyed by name, each loaded when it is looked up."""

    plugins: Plugins = Plugins("recipe", "metaloom.recipes", {})

    def __getitem__(self, name: str) -> "Callable[[], RunConfig]":
        """Return the recipe with this name; raise KeyError if it is unknown, ConfigError if its package is broken."""
        if name in _entries():
            return Recipe.named(name)
        try:
            path = self.plugins.path(name)
        except ConfigError as problem:
            raise KeyError(name) from problem
        return load(path)

    def __iter__(self) -> Iterator[str]:
        return iter([*_entries(), *(name for name in self.plugins.names() if name not in _entries())])

    def __len__(self) -> int:
        return len([*iter(self)])


RECIPES = Recipes()


def new_config(recipe_or_file: str, assignments: Iterable[str] = ()) -> "RunConfig":
    """Build the configuration of a new run from a recipe or settings file and KEY=VALUE assignments.

    Raises ConfigError if a setting is invalid, or EnvError if the environment does not exist.
    """
    recipe, assignments = load_settings(recipe_or_file), [*assignments]
    last = {key: value for key, _, value in (assignment.partition("=") for assignment in assignments)}
    network = last.get("policy.network")
    if network is not None and network not in SIZED_NETWORKS and not is_settings_file(recipe_or_file):
        # The recipe's sizes do not apply to a custom network.
        for section in recipe.keys() & {"policy", "algorithm"}:
            fields = recipe[section].items()
            recipe[section] = {name: value for name, value in fields if not name.endswith("hidden_sizes")}
    settings = override(recipe, assignments)
    # Imported only after finding the recipe, since the import takes longer than everything before.
    from metaloom.pipeline.config.run import build_config

    try:
        config = build_config(settings)
    except ConfigError as problem:
        name = last.get("algorithm.name")
        if name is not None and "algorithm." in str(problem) and "unknown key" in str(problem):
            raise ConfigError(
                f"algorithm.name={name}: the other settings belong to another algorithm. Use algorithm={name}, which "
                "replaces all of them with its own, or start from its recipe"
            ) from None
        raise
    if config.env.name not in ENVS:
        # This imports the user's module and gymnasium, which takes longer than everything else here.
        from metaloom.pipeline.envs.registry import require_env

        require_env(config.env.name)
    return config


def is_settings_file(recipe_or_file: str) -> bool:
    """Return True for the path of a settings file, False for the name of a recipe."""
    return Path(recipe_or_file).suffix in (".yaml", ".yml", ".json", ".toml")


def load_settings(recipe_or_file: str) -> dict[str, Any]:
    """Return the settings of a recipe, or of a YAML, JSON or TOML file; raise ConfigError if it cannot be read."""
    if is_settings_file(recipe_or_file):
        return load_config(Path(recipe_or_file))
    try:
        recipe = RECIPES[recipe_or_file]
    except KeyError:
        raise ConfigError(
            f"no recipe {recipe_or_file!r}: `metaloom recipes` lists the recipes; a settings file must end in "
            f".yaml, .json or .toml{suggestion(recipe_or_file, RECIPES)}"
        ) from None
    # Omit defaults that the algorithm or environment determines, since either may be replaced.
    with step_limits_left_open():
        config = recipe()
    return config.model_dump(mode="json", include=config.model_fields_set, exclude={"env": config.env.left_open})

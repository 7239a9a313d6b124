"""Named configurations, as Python functions: the name a user types, the paper it comes from, the settings.

Every public function of a module in this folder is a recipe, named for the function with dashes. Those of other
packages are entry points of the group metaloom.recipes.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metaloom.pipeline.config.input import ConfigError, load_config, override
from metaloom.pipeline.envs import ENVS
from metaloom.pipeline.envs.config import step_limits_left_open
from metaloom.pipeline.nn.spec import SIZED_NETWORKS
from metaloom.pipeline.plugins import Plugins, load
from metaloom.pipeline.schema import suggestion

if TYPE_CHECKING:
    from metaloom.pipeline.config.run import RunConfig


def _own_recipes() -> dict[str, str]:
    """Name -> module:function, read without importing the modules: one recipe needs one algorithm's settings."""
    found = (
        (function, f"{__name__}.{file.stem}:{function}")
        for file in Path(__file__).parent.glob("*.py")
        for function in re.findall(r"^def ([a-z]\w*)\(\) -> RunConfig:", file.read_text("utf-8"), re.MULTILINE)
    )
    return {function.replace("_", "-"): path for function, path in sorted(found)}


class Recipes(Mapping[str, "Callable[[], RunConfig]"]):
    """Recipes by name; what a recipe needs is imported when it is looked up."""

    plugins = Plugins("recipe", "metaloom.recipes", _own_recipes())

    def __getitem__(self, name: str) -> "Callable[[], RunConfig]":
        """Import the recipe of this name.

        Raises:
            KeyError: there is none.
            ConfigError: the package that brings it is broken.
        """
        try:
            path = self.plugins.path(name)
        except ConfigError as problem:
            raise KeyError(name) from problem
        return load(path)

    def __iter__(self) -> Iterator[str]:
        """All names."""
        return iter(self.plugins.names())

    def __len__(self) -> int:
        """Number of recipes."""
        return len(self.plugins.names())


RECIPES = Recipes()


def new_config(recipe_or_file: str, assignments: Iterable[str] = ()) -> "RunConfig":
    """The configuration of a new run.

    Raises:
        ConfigError: a setting is wrong.
        EnvError: there is no such environment.
    """
    recipe, assignments = load_settings(recipe_or_file), [*assignments]
    networks = [value for key, _, value in (a.partition("=") for a in assignments) if key == "policy.network"]
    if networks and networks[-1] not in SIZED_NETWORKS and not is_settings_file(recipe_or_file):
        # Sizes of the recipe's networks are not those of the user's own.
        for section in recipe.keys() & {"policy", "algorithm"}:
            fields = recipe[section].items()
            recipe[section] = {name: value for name, value in fields if not name.endswith("hidden_sizes")}
    settings = override(recipe, assignments)
    # After the recipe is known to exist: its import takes longer than all before it.
    from metaloom.pipeline.config.run import build_config
    from metaloom.pipeline.schema import ConfigError

    try:
        config = build_config(settings)
    except ConfigError as problem:
        names = [value for key, _, value in (a.partition("=") for a in assignments) if key == "algorithm.name"]
        if names and "algorithm." in str(problem) and "unknown key" in str(problem):
            raise ConfigError(
                f"algorithm.name={names[-1]}: found settings that are another algorithm's; required "
                f"algorithm={names[-1]}, which replaces all of them by its own. Or start from its own recipe"
            ) from None
        raise
    if config.env.name not in ENVS:
        # Imports gymnasium, which takes longer than all else here, and the user's module.
        from metaloom.pipeline.envs.registry import require_env

        require_env(config.env.name)
    return config


def is_settings_file(recipe_or_file: str) -> bool:
    """Tell a file of settings from a recipe."""
    return Path(recipe_or_file).suffix in (".yaml", ".yml", ".json", ".toml")


def load_settings(recipe_or_file: str) -> dict[str, Any]:
    """The settings of a recipe by name, or those in a YAML, JSON or TOML file.

    Raises:
        ConfigError: there is no such recipe, or the file cannot be read.
    """
    if is_settings_file(recipe_or_file):
        return load_config(Path(recipe_or_file))
    names = [*RECIPES]
    if recipe_or_file not in names:
        raise ConfigError(
            f"no recipe {recipe_or_file!r}: `metaloom recipes` lists all, and a file of settings ends in .yaml, .json "
            f"or .toml{suggestion(recipe_or_file, names)}"
        )
    # What a recipe leaves to the algorithm and the environment is decided anew when one of them is replaced.
    with step_limits_left_open():
        config = RECIPES[recipe_or_file]()
    return config.model_dump(mode="json", include=config.model_fields_set)

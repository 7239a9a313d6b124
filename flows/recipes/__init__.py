"""Named configurations, as Python functions: the name a user types, the paper it comes from, the settings."""

import difflib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flows.recipes import promp
from pipeline.config import ConfigError, RunConfig, load_config

RECIPES: dict[str, Callable[[], RunConfig]] = {
    "promp-half-cheetah-dir": promp.half_cheetah_dir,
    "promp-half-cheetah-vel": promp.half_cheetah_vel,
    "promp-point-corner": promp.point_corner,
}


def load_settings(recipe_or_file: str) -> dict[str, Any]:
    """The settings of a recipe by name, or those in a YAML or JSON file."""
    if recipe_or_file in RECIPES:
        return RECIPES[recipe_or_file]().model_dump(mode="json")
    path = Path(recipe_or_file)
    if path.suffix in (".yaml", ".yml", ".json"):
        return load_config(path)
    close = difflib.get_close_matches(recipe_or_file, RECIPES)
    raise ConfigError(
        f"found recipe {recipe_or_file!r}; required one of {', '.join(sorted(RECIPES))}, or a .yaml or .json file"
        + (f". Did you mean {close[0]}?" if close else "")
    )

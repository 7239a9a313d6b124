"""`recipes`: names of recipes, and settings to train with."""

from metaloom.flows.arguments import checked
from metaloom.flows.operations import late


@checked
def recipes() -> list[str]:
    """List the recipes, or print the settings of one.

    `metaloom train` accepts the printed settings as a file.

    Example: `metaloom recipes promp-half-cheetah-dir --format toml`

    Returns:
        Names of all recipes, including recipes of installed packages.
    """
    return [*late.RECIPES]

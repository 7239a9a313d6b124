"""`recipes`: lists recipes, or prints the settings of one."""

from metaloom.flows.arguments import checked
from metaloom.flows.operations import late


@checked
def recipes() -> list[str]:
    """List the recipes, or print the settings of one.

    `metaloom train` accepts the printed settings as a file.

    Example: `metaloom recipes promp-half-cheetah-dir --format toml`

    Returns:
        Names of all recipes, including those from installed packages.
    """
    return [*late.RECIPES]

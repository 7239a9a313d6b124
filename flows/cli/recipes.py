"""`metaloom recipes`."""

from metaloom.flows.cli.options import AsJson, Flag
from metaloom.flows.cli.output import console, print_json


def recipes(*, schema: Flag = False, as_json: AsJson = False) -> int:
    """List the recipes, or print the schema of all settings.

    Example: `metaloom recipes --schema`

    Args:
        schema: Print the JSON schema of every setting instead.
    """
    from metaloom.flows.views.tables import recipe_rows, recipes_table
    from metaloom.pipeline.config.run import RunConfig

    if schema:
        print_json(RunConfig.model_json_schema())
    elif as_json:
        print_json(recipe_rows())
    else:
        console().print(recipes_table(recipe_rows()))
    return 0

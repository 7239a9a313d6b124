"""`metaloom recipes`."""

from metaloom.flows.cli.options import AsJson, Flag
from metaloom.flows.cli.output import answer, print_json


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
    else:
        answer(as_json, recipe_rows, lambda: recipes_table(recipe_rows()))
    return 0

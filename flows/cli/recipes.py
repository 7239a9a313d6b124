"""Terminal part of `metaloom recipes`: a table of recipes, or settings to train with."""

from typing import Annotated, Literal

from cyclopts import Parameter

from metaloom.flows.cli.generated import Call
from metaloom.flows.cli.output import answer, print_json
from metaloom.flows.operations import late
from metaloom.flows.operations.options import Overrides, complete_recipes, refuse_with, refuse_without
from metaloom.flows.views.status import STATUS


def recipes(
    call: Call[list[str]],
    recipe: Annotated[
        str | None,
        Parameter(help="Print all settings of this recipe, or of this file of settings.", completer=complete_recipes),
    ] = None,
    *,
    form: Annotated[
        Literal["yaml", "toml", "json"] | None, Parameter(name="--format", help="Kind of file; yaml by default.")
    ] = None,
    overrides: Overrides = (),
    schema: Annotated[bool, Parameter(help="Print the JSON schema of every setting instead.")] = False,
    envs: Annotated[
        bool, Parameter(help="List the environments instead; recipes take any of them with `--set env=NAME`.")
    ] = False,
    as_json: bool = False,
) -> int:
    """Print recipes, the settings of one, environments or the schema."""
    if recipe is not None:
        refuse_with("a recipe", schema=schema, envs=envs, json=as_json)
        text = late.settings_file(late.new_config(recipe, overrides), form or "yaml")
        STATUS.end()
        print(text, end="")
        return 0
    refuse_without("a recipe", format=form, set=overrides or None)
    if envs:
        refuse_with("--envs", schema=schema)
        names = late.PLUGINS.names()
        answer(as_json, lambda: names, lambda: "\n".join(names))
        return 0
    if schema:
        print_json(late.RunConfig.model_json_schema())
    else:
        answer(as_json, late.recipe_rows, lambda: late.recipes_table(late.recipe_rows()))
    return 0

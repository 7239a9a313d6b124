"""`graph`: draws a run's stages and their inputs."""

from typing import Annotated, Literal

from cyclopts import Parameter

from metaloom.flows.arguments import checked
from metaloom.flows.errors import UsageError
from metaloom.flows.operations import late
from metaloom.flows.operations.options import Overrides, Trust, agree, changes
from metaloom.flows.runs import run_folder
from metaloom.storage import open_run, run_exists

Form = Literal["text", "mermaid", "svg"]


@checked
def graph(
    recipe: Annotated[str, Parameter(help="A recipe, a .yaml, .json or .toml settings file, or a stored run.")],
    *,
    form: Annotated[Form, Parameter(name="--format")] = "text",
    overrides: Overrides = (),
    trust: Trust = False,
) -> str:
    """Draw a run's stages and their inputs.

    Example: `metaloom graph promp-half-cheetah-dir --format mermaid`

    Args:
        recipe: A recipe, a settings file, or a stored run.
        form: Text table, Markdown flowchart or image.
        overrides: Settings to change, as KEY=VALUE.
        trust: Allow importing the modules that the run's settings name, now and later.
    """
    if recipe in [*late.RECIPES] or late.is_settings_file(recipe):
        settings = late.load_settings(recipe)
    elif run_exists(folder := run_folder(recipe)):
        agree(folder, trust)
        settings = late.config_of(open_run(folder)).model_dump(mode="json")
    else:
        raise UsageError(
            f"no recipe and no stored run {recipe!r}: `metaloom recipes` and `metaloom ls` list them"
            f"{late.suggestion(recipe, late.RECIPES)}"
        )
    return late.FORMATS[form](late.diagram_of(late.build_config(late.override(settings, changes(overrides)))))

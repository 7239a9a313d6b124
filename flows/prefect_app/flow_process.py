"""The process of a flow run under `metaloom serve`: Prefect's engine, which follows no settings of the folder.

Prefect reads `prefect.toml`, `pyproject.toml` and `.env` of the folder in which it works, and Python imports what lies
there before anything installed. Both may be somebody else's. So this is started by `python -P`, and the folder is
entered when Prefect has been imported; modules in it are found last, for plug-ins (metaloom/pipeline/plugins.py).
"""

import os
import runpy
from pathlib import Path
from typing import Any

from pydantic_settings import BaseSettings, InitSettingsSource

MODULE = "metaloom.flows.prefect_app.flow_process"


class NoSettings(InitSettingsSource):
    """Replaces the source that reads a file of the folder."""

    def __init__(self, settings_cls: type[BaseSettings], **_: Any) -> None:
        super().__init__(settings_cls, {})


def ignore_folder_settings() -> None:
    """Have Prefect read its settings from the environment and the profile alone."""
    os.chdir("/")
    from prefect.settings import base

    module: Any = base
    for source in (
        "FilteredDotEnvSettingsSource",
        "PrefectTomlConfigSettingsSource",
        "PyprojectTomlConfigSettingsSource",
    ):
        getattr(module, source)  # raises where Prefect calls it otherwise
        setattr(module, source, NoSettings)


def main() -> None:
    """Execute the flow run that the environment names."""
    ignore_folder_settings()
    # Of what `metaloom serve` keeps in the folder where flows run.
    os.chdir(Path(os.environ["PREFECT_HOME"]).parent)
    runpy.run_module("prefect.engine", run_name="__main__")


if __name__ == "__main__":
    main()

"""Process of a flow run under `metaloom serve`: Prefect's engine without the folder's settings.

Prefect reads `prefect.toml`, `pyproject.toml` and `.env` in its working directory, and Python imports modules there
before installed ones. Both may belong to somebody else. So this process is started with `python -P` and enters the
folder only after importing Prefect. Modules in the folder are found last, for plug-ins (metaloom/pipeline/plugins.py).
"""

import os
import runpy
from pathlib import Path
from typing import Any

from pydantic_settings import BaseSettings, InitSettingsSource

MODULE = "metaloom.flows.prefect_app.flow_process"


class NoSettings(InitSettingsSource):
    """Empty settings source, which replaces the sources that read files in the folder."""

    def __init__(self, settings_cls: type[BaseSettings], **_: Any) -> None:
        super().__init__(settings_cls, {})


def ignore_folder_settings() -> None:
    """Make Prefect read its settings only from environment variables and the profile."""
    os.chdir("/")
    from prefect.settings import base

    module: Any = base
    for kind in ("FilteredDotEnv", "PrefectTomlConfig", "PyprojectTomlConfig"):
        getattr(module, f"{kind}SettingsSource")  # raises if Prefect renames it
        setattr(module, f"{kind}SettingsSource", NoSettings)


def main() -> None:
    """Execute the flow run named in the environment variables."""
    ignore_folder_settings()
    # PREFECT_HOME is in the folder where flows run.
    os.chdir(Path(os.environ["PREFECT_HOME"]).parent)
    runpy.run_module("prefect.engine", run_name="__main__")


if __name__ == "__main__":
    main()

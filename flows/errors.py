"""Expected errors, which commands report in one line with an exit code. Other errors are bugs and show a traceback."""

import re
import traceback
from importlib.metadata import PackageNotFoundError, distribution


class UsageError(ValueError):
    """Raised for an impossible request; the message states what is possible."""


class ExtraMissing(UsageError):
    """Raised if a package from one of Metaloom's extras is not installed."""

    def __init__(self, extra: str, package: str | None = None) -> None:
        super().__init__(f"{package or extra} is not installed; `pip install 'metaloom[{extra}]'` installs it")


_EXTRAS = {
    "PIL": "view",
    "matplotlib": "view",
    "plotly": "view",
    "h5py": "minari",
    "minari": "minari",
    "deltalake": "delta",
}
"""Extras that install optional modules, keyed by module name."""


def explained(error: Exception) -> Exception:
    """Return a UsageError that says how to install a missing module, or the error itself if it has another cause."""
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return error
    module = error.name.partition(".")[0]
    if module in _EXTRAS:
        return ExtraMissing(_EXTRAS[module], "pillow" if module == "PIL" else module)
    try:
        required = distribution("metaloom").requires or ()
    except PackageNotFoundError:  # Metaloom is not installed, only found on the path, as in a checkout
        return error
    if all(map(_is_installed, required)):
        return error
    return UsageError(
        f"{module} is not installed: this installation only reads runs. `pip install metaloom` installs it"
    )


def _is_installed(requirement: str) -> bool:
    """Return True if a requirement's package is installed or only an extra needs it."""
    try:
        return "extra ==" in requirement or bool(distribution(re.split(r"[^\w.-]", requirement, maxsplit=1)[0]))
    except PackageNotFoundError:
        return False


def exit_text(ended: SystemExit) -> str:
    """Return a message about a plug-in's request to exit, which would end the program as if it had succeeded."""
    last = traceback.extract_tb(ended.__traceback__)[-1]
    return (
        f"{last.filename}, line {last.lineno}, in {last.name} asked Python to exit "
        f"({str(ended) or 'without a reason'}); it must return a result or raise an error"
    )


class WorkersError(ConnectionError):
    """Raised if worker processes or their scheduler cannot be reached or used."""


class StartAgain(Exception):
    """Raised to restart a command with other environment variables, since libraries select CPU code paths on import."""

    def __init__(self, environment: dict[str, str]) -> None:
        super().__init__("must run in another process, which `metaloom` starts")
        self.environment = environment


USAGE, FAILURE, EXIT_INTERRUPTED = 2, 1, 130

# Keyed by name, because importing the classes takes seconds and a failing command needs few of them.
EXIT_CODES = {
    "metaloom.flows.errors.UsageError": USAGE,
    "metaloom.flows.errors.WorkersError": FAILURE,
    "metaloom.pipeline.shown.ConfigError": USAGE,
    "metaloom.pipeline.envs.contract.EnvError": USAGE,
    "metaloom.storage.errors.InvalidRunName": USAGE,
    "metaloom.storage.errors.NotARun": USAGE,
    "metaloom.storage.errors.RunExists": USAGE,
    "metaloom.storage.errors.RunNotFound": USAGE,
    "metaloom.storage.export.ExportExists": USAGE,
    "metaloom.storage.errors.StoreError": FAILURE,
    "metaloom.pipeline.algorithms.contract.NumericalError": FAILURE,
    "metaloom.pipeline.baselines.contract.BaselineError": FAILURE,
    "metaloom.stages.faults.StageFault": FAILURE,
    "metaloom.flows.prefect_app.parts.ServeError": FAILURE,
}


def exit_code(error: Exception) -> int | None:
    """Return an expected error's exit code; None for other errors, such as those raised by a user's environment."""
    # Dask reads the user's configuration files on import, and its message names the invalid one.
    if isinstance(error, ValueError) and str(error).startswith("A dask config file at "):
        return USAGE
    names = (f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__)
    return next((EXIT_CODES[name] for name in names if name in EXIT_CODES), None)

"""Errors that a command reports in one line, with their exit codes. All others are bugs and keep their traceback."""

import re
from importlib.metadata import PackageNotFoundError, distribution


class UsageError(ValueError):
    """A command asks for something that cannot be done; the message says what can."""


class ExtraMissing(UsageError):
    """A package is needed that only one of Metaloom's extras brings."""

    def __init__(self, extra: str, package: str | None = None) -> None:
        super().__init__(f"{package or extra} is not installed; `pip install 'metaloom[{extra}]'` brings it")


_EXTRAS = {
    "PIL": "view",
    "matplotlib": "view",
    "plotly": "view",
    "h5py": "minari",
    "minari": "minari",
    "deltalake": "delta",
}
"""Extras by the modules that they bring."""


def explained(error: Exception) -> Exception:
    """Return the error that says which package brings a missing module; any other error as it is."""
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return error
    module = error.name.partition(".")[0]
    if module in _EXTRAS:
        return ExtraMissing(_EXTRAS[module], "pillow" if module == "PIL" else module)
    try:
        required = distribution("metaloom").requires or ()
    except PackageNotFoundError:  # found on the path alone, as in a checkout
        return error
    if all(map(_is_installed, required)):
        return error
    return UsageError(f"{module} is not installed, as where runs are only read; `pip install metaloom` brings it")


def _is_installed(requirement: str) -> bool:
    """Return True for a requirement whose package is there, in any version, and for one of an extra."""
    try:
        return "extra ==" in requirement or bool(distribution(re.split(r"[^\w.-]", requirement, maxsplit=1)[0]))
    except PackageNotFoundError:
        return False


class WorkersError(ConnectionError):
    """Worker processes or their scheduler cannot be reached, or cannot be used; the message says what helps."""


class StartAgain(Exception):
    """A command has to start again in another environment, because libraries choose their code when imported.

    Attributes:
        environment: Environment variables to start with.
    """

    def __init__(self, environment: dict[str, str]) -> None:
        super().__init__("required another process, which `metaloom` starts")
        self.environment = environment


USAGE, FAILURE, EXIT_INTERRUPTED = 2, 1, 130

# By name, because importing them takes seconds and a command that fails has often needed few of them.
EXIT_CODES = {
    "metaloom.flows.errors.UsageError": USAGE,
    "metaloom.flows.errors.WorkersError": FAILURE,
    "metaloom.pipeline.refusals.ConfigError": USAGE,
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
    """Return the exit code of an error that its message explains; None for any other, as of a user's environment."""
    # Dask reads the user's configuration files when it is imported, and names the faulty one.
    if isinstance(error, ValueError) and str(error).startswith("A dask config file at "):
        return USAGE
    names = (f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__)
    return next((EXIT_CODES[name] for name in names if name in EXIT_CODES), None)

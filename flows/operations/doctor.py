"""`doctor`: checks this machine or an environment."""

from typing import TYPE_CHECKING

from metaloom.flows.arguments import checked
from metaloom.flows.errors import UsageError
from metaloom.flows.operations import late
from metaloom.flows.operations.options import Overrides, changes
from metaloom.flows.runs import runs_root

if TYPE_CHECKING:
    from metaloom.flows.results.checks import Checks


@checked
def doctor(*, env: str | None = None, overrides: Overrides = ()) -> "Checks":
    """Check this machine or an environment.

    The machine check covers packages, cores, disk, physics and Prefect. Exit code 1 if a check fails; the output
    suggests remedies.

    Example: `metaloom doctor --env my_envs:Thermostat --set env.options.target=20`

    Args:
        env: Check this environment instead: its return values must be valid and identical in two runs.
        overrides: Environment settings to change, as KEY=VALUE.
    """
    if env is None and overrides:
        raise UsageError("--set requires --env; add --env, or remove --set")
    if env is None:
        return late.Checks(late.check_all(runs_root()))
    # Imported here, since the other table must show a broken package as a row.
    return late.Checks(late.check_environment(late.env_config(env, changes(overrides))))

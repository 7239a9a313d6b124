"""`doctor`: checks of this machine, or of an environment."""

from typing import TYPE_CHECKING

from metaloom.flows.arguments import checked
from metaloom.flows.errors import UsageError
from metaloom.flows.operations import late
from metaloom.flows.operations.options import Overrides, changes
from metaloom.flows.runs import runs_root

if TYPE_CHECKING:
    from metaloom.flows.results.doctor import Checks


@checked
def doctor(*, env: str | None = None, overrides: Overrides = ()) -> "Checks":
    """Check this machine, or an environment.

    The machine check covers packages, cores, disk, physics and Prefect.

    Exit code 1 when something is wrong; the output names remedies.

    Example: `metaloom doctor --env my_envs:Thermostat --set env.options.target=20`

    Args:
        env: Check this environment instead: its return values must be valid, and the same in two runs.
        overrides: Environment settings to change, as KEY=VALUE.
    """
    if env is None and overrides:
        raise UsageError("found --set without --env; required both: the machine has no settings")
    if env is None:
        return late.Checks(late.check_all(runs_root()))
    # Imported here: a broken package must become a line of the other table.
    return late.Checks(late.check_environment(late.env_config(env, changes(overrides))))

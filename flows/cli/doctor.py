"""`metaloom doctor`."""

from dataclasses import asdict

from metaloom.flows.cli.options import AsJson, Overrides
from metaloom.flows.cli.output import answer
from metaloom.flows.errors import UsageError
from metaloom.flows.runs import runs_root


def doctor(*, env: str | None = None, overrides: Overrides = (), as_json: AsJson = False) -> int:
    """Check this machine, or an environment.

    Of the machine: packages, cores, disk, physics and Prefect.

    Exit code 1 when something is wrong; the output says what helps.

    Example: `metaloom doctor --env my_envs:Thermostat --set env.options.target=20`

    Args:
        env: Check this environment instead: that what it returns is sound, and the same when it is run twice.
    """
    if env is None and overrides:
        raise UsageError("found --set without --env; required both: the machine has no settings")
    from metaloom.flows.commands.doctor import check_all
    from metaloom.flows.views.tables import doctor_view

    if env is None:
        checks = check_all(runs_root())
    else:
        # Imported only here: a broken package must become a line of the other table.
        from metaloom.flows.commands.check_env import check_environment, env_config

        checks = check_environment(env_config(env, overrides))
    answer(as_json, lambda: [asdict(check) for check in checks], lambda: doctor_view(checks))
    return 0 if all(check.ok for check in checks) else 1

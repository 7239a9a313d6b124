"""Prefect plugin with which `prefect deployment run meta-train` finds the folder's server and the deployment.

The plugin gives Prefect the password that `metaloom serve` stored in the folder, only for that server and only while
it runs.

Prefect requires deployment names of the form FLOW/DEPLOYMENT; this plugin reads NAME as NAME/NAME. If plugins are
enabled, as in the prefect.toml that `metaloom serve` writes, Prefect loads the plugin on every import through the entry
point group `prefect.plugins`, so it must be cheap to import. It wraps private methods of Prefect's deployment clients;
`tests/flows/test_prefect_server.py` runs the real command against a real server.
"""

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prefect.plugins import HookContext, SetupResult, register_hook

from metaloom.flows.prefect_app.home import API, AUTH, ENVIRONMENT, is_same_api, read_environment, unproxied
from metaloom.flows.prefect_app.parts import is_served

_METHOD = "read_deployment_by_name"


@register_hook
def setup_environment(*, ctx: HookContext) -> SetupResult | None:
    """Let Prefect's clients accept bare deployment names, and return environment variables for Prefect.

    Prefect calls this function on import.
    """
    try:
        from prefect.client.orchestration._deployments.client import DeploymentAsyncClient, DeploymentClient

        for client in (DeploymentClient, DeploymentAsyncClient):
            accept_bare_names(client)
    except (ImportError, AttributeError) as error:
        ctx.logger_factory(__name__).warning(
            "Prefect %s keeps its deployment client elsewhere (%s), so a bare deployment name does not resolve; "
            "type FLOW/DEPLOYMENT, for example meta-train/meta-train",
            ctx.prefect_version,
            error,
        )
    served = read_environment(Path())
    if ctx.api_url is None or API not in served or not is_same_api(ctx.api_url, served[API]):
        return None
    # A password that the user chose is not stored; the user exports it.
    password = {AUTH: served[AUTH]} if AUTH in served else {}
    if password and not is_served(ENVIRONMENT.parent):
        ctx.logger_factory(__name__).warning(
            "no `metaloom serve` is running here, so its password is not sent to %s, where anybody could be listening",
            ctx.api_url,
        )
        password = {}
    # Use the address instead of `localhost`, which may resolve to another address where somebody else listens.
    return SetupResult(env={API: served[API], **password, **unproxied(os.environ, served[API])})


def accept_bare_names(client: type) -> None:
    """Make a client class read the deployment name NAME as NAME/NAME. Idempotent."""
    read: Callable[..., Any] = getattr(client, _METHOD)
    if hasattr(read, "__wrapped__"):
        return

    # One wrapper serves both clients: it returns a result for the first and a coroutine for the second.
    @functools.wraps(read)
    def read_by_name(self: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        return read(self, full_name(name), *args, **kwargs)

    setattr(client, _METHOD, read_by_name)


def full_name(name: str) -> str:
    """Return the full name of a deployment, FLOW/DEPLOYMENT; a bare name stands for both."""
    return name if "/" in name else f"{name}/{name}"

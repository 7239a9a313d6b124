"""Lets `prefect deployment run meta-train` reach the server of the folder, and find `meta-train/meta-train`.

It hands Prefect the password that `metaloom serve` keeps in the folder, for this server alone and while it runs.

Prefect names a deployment FLOW/DEPLOYMENT and takes nothing shorter. This plugin makes a name without a slash stand for
NAME/NAME. Prefect loads it through the entry point group `prefect.plugins` wherever plugins are enabled, as they are by
prefect.toml, which `metaloom serve` writes into its folder, each time it is imported, so nothing heavy belongs here.

It wraps methods of Prefect's deployment clients, which are private; `tests/flows/test_prefect_server.py` runs the real
command against a real server.
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
    """Called by Prefect when it is imported."""
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
    # Where the user has chosen the password it is not kept, and the user exports it.
    password = {AUTH: served[AUTH]} if AUTH in served else {}
    if password and not is_served(ENVIRONMENT.parent):
        ctx.logger_factory(__name__).warning(
            "no `metaloom serve` runs in this folder: its password is not sent to %s, where anybody can listen now",
            ctx.api_url,
        )
        password = {}
    # By its address and not as `localhost`, which may be another one, where somebody else can listen.
    return SetupResult(env={API: served[API], **password, **unproxied(os.environ, served[API])})


def accept_bare_names(client: type) -> None:
    """Make the client read NAME as NAME/NAME; doing so twice changes nothing."""
    read: Callable[..., Any] = getattr(client, _METHOD)
    if hasattr(read, "__wrapped__"):
        return

    # One wrapper serves both clients: what it returns is the answer of the one and the coroutine of the other.
    @functools.wraps(read)
    def read_by_name(self: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        return read(self, full_name(name), *args, **kwargs)

    setattr(client, _METHOD, read_by_name)


def full_name(name: str) -> str:
    """FLOW/DEPLOYMENT for a deployment that is named like its flow."""
    return name if "/" in name else f"{name}/{name}"

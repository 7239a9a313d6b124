"""Lets `prefect deployment run meta-train` find `meta-train/meta-train`.

Prefect names a deployment FLOW/DEPLOYMENT and takes nothing shorter. This plugin makes a name without a slash stand for
NAME/NAME. Prefect loads it through the entry point group `prefect.plugins` wherever plugins are enabled, as they are by
prefect.toml, which `metaloom serve` writes into its folder, each time it is imported, so nothing heavy belongs here.

It wraps methods of Prefect's deployment clients, which are private; `tests/flows/test_prefect_server.py` runs the real
command against a real server.
"""

import functools
from collections.abc import Callable
from typing import Any

from prefect.plugins import HookContext, register_hook

_METHOD = "read_deployment_by_name"


@register_hook
def setup_environment(*, ctx: HookContext) -> None:
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

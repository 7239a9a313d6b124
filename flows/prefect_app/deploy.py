"""Update of the work pool, deployments and flow runs of `metaloom serve`, with messages about the changes.

Missing objects are created from prefect.yaml. In existing ones, only what depends on the version is updated: the flow's
location, its parameters and its start command. Users' changes are kept: limits, job variables, descriptions, default
parameters, tags, schedules and pauses. Abandoned flow runs are restarted.
"""

import os
import shlex
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import yaml
from prefect import Flow, get_client
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import DeploymentUpdate, WorkPoolCreate
from prefect.exceptions import ObjectNotFound
from prefect.utilities.callables import parameter_schema
from prefect.utilities.importtools import import_object
from prefect.workers.process import ProcessWorker

from metaloom.flows.operations import INSTALLED, operations
from metaloom.flows.prefect_app.flow_process import MODULE
from metaloom.flows.prefect_app.flow_runs import POOL, QUEUE, TRAININGS, restart_left_over

FILE = Path(__file__).parent / "prefect.yaml"
# Step used by earlier versions, with which Prefect imported modules in the folder before installed ones.
_EARLIER_STEP = "prefect.deployments.steps.set_working_directory"


def deploy(client: SyncPrefectClient) -> Iterator[str]:
    """Create or update the work pool and all deployments; yield messages on updates, pauses and broken operations."""
    yield from _make_pool(client)
    for wanted in yaml.safe_load(FILE.read_text("utf-8"))["deployments"]:
        yield from _deploy(client, wanted, import_object(wanted["entrypoint"]))
    for name, operation in operations().items():
        if operation.group != INSTALLED:
            continue
        entrypoint = f"{__package__}.generated.flow_{name}"
        wanted = {"name": name, "entrypoint": entrypoint, "tags": ["metaloom"], "work_pool": {"name": POOL}}
        try:
            flow = import_object(entrypoint)
        except (Exception, SystemExit) as problem:
            yield operation.broken(problem)
        else:
            yield from _deploy(client, wanted, flow)


def _make_pool(client: SyncPrefectClient) -> Iterator[str]:
    try:
        pool = client.read_work_pool(POOL)
    except ObjectNotFound:
        template = ProcessWorker.get_default_base_job_template()
        client.create_work_pool(WorkPoolCreate(name=POOL, type=ProcessWorker.type, base_job_template=template))
    else:
        if pool.is_paused:
            yield f"the work pool {POOL} is paused: nothing runs until `prefect work-pool resume {POOL}`"
    try:
        queue = client.read_work_queue_by_name(QUEUE, work_pool_name=POOL)
    except ObjectNotFound:
        queue = client.create_work_queue(QUEUE, work_pool_name=POOL)
        client.update_work_queue(queue.id, concurrency_limit=TRAININGS)
    if queue.is_paused:
        yield f"the work queue {QUEUE} is paused: nothing trains until `prefect work-queue resume {QUEUE} -p {POOL}`"


def _deploy(client: SyncPrefectClient, wanted: dict[str, Any], flow: Flow[..., Any]) -> Iterator[str]:
    name = f"{flow.name}/{wanted['name']}"
    command = shlex.join([sys.executable, "-P", "-m", MODULE])
    form = parameter_schema(flow).model_dump_for_openapi()
    ours: dict[str, Any] = {"entrypoint": wanted["entrypoint"], "parameter_openapi_schema": form}
    try:
        found = client.read_deployment_by_name(name)
    except ObjectNotFound:
        client.create_deployment(
            client.create_flow(flow),
            wanted["name"],
            description=flow.description,
            tags=wanted["tags"],
            work_pool_name=wanted["work_pool"]["name"],
            work_queue_name=wanted["work_pool"].get("work_queue_name"),
            enforce_parameter_schema=True,
            job_variables={"command": command},
            **ours,
        )
        return
    if found.pull_steps and [*found.pull_steps[0]] == [_EARLIER_STEP] and len(found.pull_steps) == 1:
        ours["pull_steps"] = []
    if _is_ours(found.job_variables.get("command")):
        ours["job_variables"] = {**found.job_variables, "command": command}
    changed = {field: value for field, value in ours.items() if getattr(found, field) != value}
    if changed:
        client.update_deployment(found.id, DeploymentUpdate(**changed))
        yield f"deployment {name}: updated {', '.join(sorted(changed))}"
    if found.paused:
        yield f"deployment {name} is paused: its schedules start nothing until it is resumed on Prefect's page"


def _is_ours(command: str | None) -> bool:
    """Return True if a deployment has no start command, or one that this module wrote, whatever its interpreter."""
    try:
        return command is None or shlex.split(command)[1:] == ["-P", "-m", MODULE]
    except ValueError:  # an unterminated quotation
        return False


def main() -> None:
    """Restart left-over flow runs and update the deployments on Prefect's current server, and print the changes."""
    with get_client(sync_client=True) as client:
        for words in chain(restart_left_over(client, Path(os.environ["PREFECT_HOME"])), deploy(client)):
            sys.stdout.write(f"{words}\n")


if __name__ == "__main__":
    main()

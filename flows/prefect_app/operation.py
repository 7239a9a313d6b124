"""The operation `serve`, which runs the flows under Prefect."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from metaloom.flows.arguments import checked
from metaloom.flows.errors import ExtraMissing


@checked
def serve(
    *,
    port: Annotated[int, Parameter(validator=Number(gte=1, lte=65534))] = 4200,
    host: str = "127.0.0.1",
    database: str | None = None,
    trust: Annotated[bool, Parameter(negative=None)] = False,
) -> None:
    """Run the flows under Prefect until Ctrl-C.

    This starts a Prefect server with its page, the deployments and a worker. Runs are stored in this folder.

    If the server or the worker ends, the command exits with code 1. Flow runs continue when it is started again.

    Example: `metaloom serve --port 4300`

    Args:
        port: Port for the server and its page; reports are served on the next port.
        host: Address to listen on; any address except this machine's own requires a password in
            PREFECT_SERVER_API_AUTH_STRING.
        database: PostgreSQL database for Prefect, `postgresql://USER@HOST/DATABASE`; default: SQLite in .prefect.
        trust: Use this folder even if others can write to it, and the database in .prefect regardless of who made it.
    """
    if find_spec("matplotlib") is None:  # the page shows learning curves
        raise ExtraMissing("view", "matplotlib")
    # Imported only here, since other commands do not need it.
    from metaloom.flows.prefect_app.serve import serve as serve_flows

    serve_flows(Path.cwd(), port, host=host, database=database, trust=trust)

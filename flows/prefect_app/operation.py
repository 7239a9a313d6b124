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
    """Run the flows under Prefect, until Ctrl-C.

    It starts a server, its page, deployments and a worker. Runs go to this folder.

    It ends, with exit code 1, when its server or worker ends. Flow runs continue from what is stored at its next start.

    Example: `metaloom serve --port 4300`

    Args:
        port: Port of the server and its page; reports have the next one.
        host: Address to listen on; any other than this machine's own needs a password in
            PREFECT_SERVER_API_AUTH_STRING.
        database: PostgreSQL database for Prefect, `postgresql://USER@HOST/DATABASE`; a SQLite file in .prefect if none.
        trust: Use this folder even if others can write to it, and the database in .prefect whoever made it.
    """
    if find_spec("matplotlib") is None:  # the page shows learning curves
        raise ExtraMissing("view", "matplotlib")
    # Imported only here, since other commands do not need it.
    from metaloom.flows.prefect_app.serve import serve as serve_flows

    serve_flows(Path.cwd(), port, host=host, database=database, trust=trust)

"""`metaloom serve`."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number


def serve(*, port: Annotated[int, Parameter(validator=Number(gte=1, lte=65535))] = 4200) -> int:
    """Serve the flows through Prefect: server, page, deployments and a worker, until Ctrl-C. Runs go to this folder.

    Example: `metaloom serve --port 4300`

    Args:
        port: Port of the server and its page, on 127.0.0.1.
    """
    # Prefect is imported by what this starts, not here.
    from metaloom.flows.prefect_app.serve import serve as serve_flows

    serve_flows(Path.cwd(), port)
    return 0

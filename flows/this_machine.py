"""Names by which this machine's own programs ask for what is served to it alone."""

from collections.abc import Sequence
from urllib.parse import urlsplit

HOSTS = ("127.0.0.1", "localhost")
"""Names of this machine that a browser may have asked for; any port, since a tunnel has another one at its end."""
REQUIRED_HOST = f"required the host {' or '.join(HOSTS)}"


def names_this_machine(hosts: Sequence[str]) -> bool:
    """Tell whether a request asks for this machine by name.

    A page of another host that has its name lead here (DNS rebinding) still has to say that name.

    Args:
        hosts: values of its header `Host`, of which there has to be one.
    """
    if len(hosts) != 1:
        return False
    try:
        return urlsplit(f"//{hosts[0]}").hostname in HOSTS
    except ValueError:
        return False

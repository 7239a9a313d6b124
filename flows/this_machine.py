"""Names of this machine in requests to servers that only serve this machine."""

from collections.abc import Sequence
from urllib.parse import urlsplit

HOSTS = ("127.0.0.1", "localhost")
"""Names of this machine in a browser's requests, with any port, since tunnels change it."""
REQUIRED_HOST = f"required the host {' or '.join(HOSTS)}"


def names_this_machine(hosts: Sequence[str]) -> bool:
    """Return True if a request is addressed to this machine.

    A page of another host whose name resolves to this machine (DNS rebinding) still sends that name.

    Args:
        hosts: Values of its `Host` header, exactly one.
    """
    if len(hosts) != 1:
        return False
    try:
        return urlsplit(f"//{hosts[0]}").hostname in HOSTS
    except ValueError:
        return False

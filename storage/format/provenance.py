"""Facts about the machine and packages that write a run."""

import os
import platform
import socket
from contextlib import suppress
from datetime import UTC, datetime
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = ("metaloom", "numpy", "torch", "mujoco", "gymnasium", "zarr", "numcodecs", "pyarrow")


@lru_cache(maxsize=1)
def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages that affect results or files."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def system() -> dict[str, str]:
    """Return facts about this machine that identify it or affect floating-point results."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        lines = []
    flags = (line.partition(":")[2].strip() for line in lines if line.startswith(("flags", "Features")))
    return {
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "libc": " ".join(platform.libc_ver()),
        "cpu": platform.processor() or platform.machine(),
        "cpu_flags": next(flags, ""),
        "cores": str(os.cpu_count()),
    }


def utc(seconds: float | None = None) -> str:
    """Format a time in seconds since 1970, by default the current time, as ISO 8601 in UTC."""
    moment = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return moment.isoformat(timespec="microseconds")

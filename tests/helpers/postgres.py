"""A PostgreSQL server of the tests' own, on the loopback interface."""

import os
import pwd
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Postgres:
    """A server with an empty database."""

    programs: Path
    folder: Path
    port: int
    user: str | None

    @property
    def url(self) -> str:
        return f"postgresql://lab@127.0.0.1:{self.port}/prefect"

    @property
    def pid(self) -> int:
        """Of the process that all others of the server end with."""
        return int((self.folder / "postmaster.pid").read_text().splitlines()[0])

    def start(self) -> None:
        options = f"-p {self.port} -c listen_addresses=127.0.0.1 -c unix_socket_directories="
        self._run("pg_ctl", "start", "--wait", "-D", self.folder, "-l", self.folder / "log", "-o", options)

    def stop(self) -> None:
        self._run("pg_ctl", "stop", "--wait", "--mode=immediate", "-D", self.folder)

    def _run(self, program: str, *arguments: str | Path) -> None:
        # PostgreSQL refuses to run as root.
        subprocess.run([self.programs / program, *arguments], check=True, user=self.user, stdout=subprocess.DEVNULL)


def programs() -> Path | None:
    """Where PostgreSQL's programs lie: on the path, or where Debian has them."""
    found = shutil.which("initdb")
    if found:
        return Path(found).resolve().parent
    return next((path.parent for path in sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), reverse=True)), None)


@contextmanager
def running_postgres(folder: Path) -> Iterator[Postgres]:
    """A server with an empty database while the context lasts; skips the test where there cannot be one."""
    found = programs()
    if found is None:
        pytest.skip("PostgreSQL is not installed: no initdb on the path or in /usr/lib/postgresql")
    user = None
    if os.geteuid() == 0:
        if "postgres" not in {entry.pw_name for entry in pwd.getpwall()}:
            pytest.skip("PostgreSQL does not run as root, and there is no user postgres")
        user = "postgres"
        folder.mkdir()
        shutil.chown(folder, user)
        for parent in folder.parents:  # which pytest makes for its own user
            if not os.access(parent, os.X_OK) or not parent.stat().st_mode & 0o001:
                parent.chmod(0o711)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = Postgres(found, folder, port, user)
    server._run("initdb", "-D", folder, "--username=lab", "--auth=trust", "--no-sync")
    server.start()
    try:
        server._run("createdb", "--host=127.0.0.1", f"--port={port}", "--username=lab", "prefect")
        yield server
    finally:
        server.stop()

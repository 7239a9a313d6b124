"""A Slurm cluster of two nodes on the loopback interface, of the tests' own."""

import getpass
import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

NEEDED = ("slurmctld", "slurmd", "munged", "sbatch", "scontrol", "scancel", "sinfo", "squeue")

CONFIGURATION = """
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SchedulerType=sched/builtin
SlurmdParameters=config_overrides
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
NodeName=n1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 State=UNKNOWN
NodeName=n2 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4 State=UNKNOWN
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


@dataclass(frozen=True)
class Slurm:
    """The cluster; its commands are run with its configuration."""

    environment: dict[str, str]

    def __call__(self, *command: str | Path, folder: Path | None = None) -> str:
        done = subprocess.run(command, env=self.environment, cwd=folder, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def state(self, job: str) -> dict[str, str]:
        """What Slurm tells of a job, by name."""
        told = self("scontrol", "show", "job", "--oneliner", job)
        return dict(part.split("=", 1) for part in told.split() if "=" in part)


@contextmanager
def running_slurm(folder: Path) -> Iterator[Slurm]:
    """A cluster while the context lasts; skips the test where Slurm is not installed."""
    path = os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"])
    if missing := [name for name in NEEDED if shutil.which(name, path=path) is None]:
        pytest.skip(f"Slurm is not installed: no {', '.join(missing)}")
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    probes = [socket.socket() for _ in range(3)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    configuration = folder / "slurm.conf"
    configuration.write_text(CONFIGURATION.format(ports=ports, user=getpass.getuser(), folder=folder))
    environment = os.environ | {"PATH": path, "SLURM_CONF": str(configuration)}
    own = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
    with ExitStack() as stack, (folder / "daemons.log").open("wb") as log:
        for command in (
            ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *own],
            ["slurmctld", "-D", "-c"],
            ["slurmd", "-D", "-N", "n1"],
            ["slurmd", "-D", "-N", "n2"],
        ):
            daemon = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
            stack.callback(daemon.wait, 30)
            stack.callback(daemon.terminate)
        slurm = Slurm(environment)
        deadline = time.monotonic() + 60
        while _idle_nodes(environment) < 2:
            assert time.monotonic() < deadline, (folder / "daemons.log").read_text()
            time.sleep(0.2)
        # Jobs end before the daemons do, which would leave them running.
        stack.callback(lambda: time.sleep(2))
        stack.callback(subprocess.run, ["scancel", f"--user={getpass.getuser()}"], env=environment)
        yield slurm


def _idle_nodes(environment: dict[str, str]) -> int:
    command = ["sinfo", "--noheader", "--Node", "--format=%T"]
    told = subprocess.run(command, env=environment, capture_output=True, text=True)
    return told.stdout.split().count("idle")

"""What a test can leave to those after it: handlers, variables, threads, processes, servers, Dask clusters."""

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Hashable
from contextlib import suppress
from pathlib import Path

import psutil

# pytest-timeout sets one of SIGALRM for each test, before the first fixture; torch's data loader keeps one of SIGCHLD.
_SIGNALS = [s for s in signal.Signals if s not in (signal.SIGKILL, signal.SIGSTOP, signal.SIGALRM, signal.SIGCHLD)]
# Of libraries, which start them once and use them until the process ends.
_LIBRARY_THREADS = (
    "zarr_io", "fsspecIO", "IO loop", "Profile", "TCP-Executor", "Dask-Offload", "AsyncProcess", "asyncio_",
    "GlobalEventLoopThread", "PrefectGlobal", "EventsWorker", "APILogWorkerThread", "ThreadPoolExecutor",
    "offload", "pymoo", "tqdm_monitor", "execnet", "Dummy", "wandb-",
)  # fmt: skip
_LIBRARY_PROCESSES = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "warm.serve()", "wandb-core")
# Of pytest, of libraries, and of our modules that prepare a library, which set them once. Those of Dask come with
# clusters that tests start themselves; flows/test_local_cluster.py looks at what our own leave.
_OTHERS_VARIABLES = (
    "PYTEST_CURRENT_TEST", "COV_CORE_", "KMP_", "TORCHINDUCTOR_", "WANDB_", "__DASK_PARENT_PID",
    "MALLOC_TRIM_THRESHOLD_", "MKL_NUM_THREADS", "PYTHONHASHSEED", "_RJEM_MALLOC_CONF", "MLFLOW_", "MUJOCO_GL",
    "PYOPENGL_PLATFORM",
)  # fmt: skip
PATIENCE_SECONDS = 5.0


def present() -> dict[Hashable, str]:
    """Return what there is of each kind, as a sentence's subject, by what identifies it."""
    found: dict[Hashable, str] = {("the working folder",): os.getcwd()}
    found |= {("the environment variable", name): value for name, value in os.environ.items()
              if not name.startswith(_OTHERS_VARIABLES)}  # fmt: skip
    found |= {("the handler of", number.name): repr(signal.getsignal(number)) for number in _SIGNALS}
    found |= {("the hook", name): repr(getattr(owner, name)) for owner in (sys, threading) for name in ("excepthook",)}
    for name in ("", *(name for name in list(logging.root.manager.loggerDict) if name.startswith("metaloom"))):
        found |= {("the log handler", name, id(handler)): repr(handler) for handler in logging.getLogger(name).handlers
                  if not type(handler).__module__.startswith("_pytest")}  # fmt: skip
    found |= {("the thread", thread.ident, thread.name): "alive" for thread in threading.enumerate()
              if not thread.name.startswith(_LIBRARY_THREADS)}  # fmt: skip
    return found | _children() | _clusters()


def _children() -> dict[Hashable, str]:
    found: dict[Hashable, str] = {}
    for children in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError, psutil.Error):
            for pid in map(int, children.read_text().split()):
                command = " ".join(psutil.Process(pid).cmdline())
                if not any(name in command for name in _LIBRARY_PROCESSES):
                    found["the process", pid] = command[:200]
    return found


def _clusters() -> dict[Hashable, str]:
    if "distributed" not in sys.modules:
        return {}
    from distributed import Client, Scheduler, Worker
    from distributed.deploy.cluster import Cluster

    parts = (*Client._instances, *Scheduler._instances, *Worker._instances, *getattr(Cluster, "_instances", ()))
    states = ((part, str(getattr(part.status, "name", part.status))) for part in parts)
    return {("the Dask part", type(part).__name__, id(part)): state for part, state in states if state == "running"}


def listening() -> dict[Hashable, str]:
    """Return the ports on which this process listens, and all processes that descend from it, of ended children too."""
    mine = psutil.Process()
    ports = (c.laddr.port for c in mine.net_connections("inet") if c.status == psutil.CONN_LISTEN)
    found: dict[Hashable, str] = {("the port", port): "open" for port in ports}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.pid != mine.pid and process.environ().get("XDG_CONFIG_HOME") == os.environ["XDG_CONFIG_HOME"]:
                command = " ".join(process.cmdline())
                if not any(name in command for name in _LIBRARY_PROCESSES):
                    found["the process", process.pid] = command[:200]
    return found


def left_over(before: dict[Hashable, str], look=present) -> list[str]:
    """Name what came, went or changed; what ends by itself gets a few seconds to do so."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        after = look()
        new = [f"{' '.join(map(str, key))}: {value}" for key, value in after.items() if before.get(key) != value]
        lasting = ("the environment variable", "the log handler")
        gone = [f"{' '.join(map(str, key))}: gone" for key in before.keys() - after.keys() if key[0] in lasting]
        if not new + gone or time.monotonic() > deadline:
            return new + gone
        time.sleep(0.02)

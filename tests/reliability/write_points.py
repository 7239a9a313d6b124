"""Every operation by which a process changes a disk, counted, so that a fault can be put exactly before the n-th.

Run as a program, it trains or resumes runs in forked children that die by SIGKILL at a given operation.
"""

import importlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

WRITES = (
    "open",
    "write",
    "pwrite",
    "ftruncate",
    "truncate",
    "fsync",
    "mkdir",
    "rmdir",
    "replace",
    "rename",
    "link",
    "unlink",
)
"""Functions of `os` that change a disk; `open` only where it creates a file."""

Act = Callable[[int, str, tuple[Any, ...]], None]


@contextmanager
def before_each_write(act: Act) -> Iterator[None]:
    """Call `act(n, function, arguments)` before the n-th write operation of this process, counted from 0."""
    count = iter(range(10**9))

    def watched(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            if (name != "open" or arguments[1] & os.O_CREAT) and not _is_of_log(arguments[0]):
                act(next(count), name, arguments)
            return original(*arguments, **named)

        return call

    with writes_replaced(watched):
        yield


def _is_of_log(path: Any) -> bool:
    """Tell whether an operation is on the folder of the log, which is no part of a run and stops nothing."""
    return isinstance(path, str | Path) and "_operator" in Path(path).parts


@contextmanager
def writes_replaced(watched: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Put `watched(name, function)` in the place of every function of WRITES."""
    originals = {name: getattr(os, name) for name in WRITES}
    for name, original in originals.items():
        setattr(os, name, watched(name, original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(os, name, original)


def fail_at(point: int, number: int, *, for_ever: bool = False) -> Act:
    """Let the operation at a point, or all from there on, fail with an error number of the system."""

    def act(n: int, name: str, arguments: tuple[Any, ...]) -> None:
        if n == point or (for_ever and n > point):
            raise OSError(number, os.strerror(number))

    return act


def kill_at(point: int, *, torn: bool) -> Act:
    """Let the process die by SIGKILL before the operation at a point; torn: with half written of what it writes."""
    write = os.write

    def act(n: int, name: str, arguments: tuple[Any, ...]) -> None:
        if n == point:
            if torn and name == "write":
                descriptor, content = arguments
                write(descriptor, bytes(content)[: len(content) // 2])
            os.kill(os.getpid(), signal.SIGKILL)

    return act


def _work(job: dict[str, Any]) -> None:
    from metaloom import storage
    from metaloom.flows.commands.thin import thin
    from metaloom.flows.commands.train import resume, train
    from metaloom.flows.rollouts.workers import Backend
    from metaloom.pipeline.config.run import build_config

    path = Path(job["path"])
    with before_each_write(kill_at(job["point"], torn=job["torn"])):
        match job["operation"]:
            case "train":
                train(build_config(job["config"]), path, backend=Backend(workers=0))
            case "pack":
                with storage.open_writer(path) as writer:
                    writer.pack()
            case "thin":
                thin(path, storage.Retention(keep_last=1))
            case operation:
                repair = operation == "repair"
                resume(path, iterations=job.get("iterations"), repair=repair, backend=Backend(workers=0))


def _serve() -> None:
    # Imported once, here, and not by every child.
    importlib.import_module("metaloom.flows.commands.train")
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                _work(json.loads(line))
                code = 0
            except Exception:
                traceback.print_exc()
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _serve()

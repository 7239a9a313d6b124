"""Python processes that begin with their imports done: forked from one that has imported, instead of started anew.

Most processes that tests start, workers and rehearsals of environments and commands, live for a second and import for
most of it. A fork gets the arguments, variables, folder, descriptors, signals and parent of the process that it stands
for, and /proc shows them so. It differs in what `sys.modules` has when it begins. Processes that would differ in
variables that an interpreter or a library reads when it starts are not forked from the same one.
"""

import _posixsubprocess
import atexit
import builtins
import ctypes
import fcntl
import gc
import importlib
import io
import json
import os
import platform
import runpy
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import types
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import RLock
from typing import Any, NamedTuple

_COMMANDS = ("metaloom.flows.cli", "metaloom.flows.commands.train", "metaloom.flows.commands.replay")
# Not what writes recordings, which asks at its import when its process began.
_WORKERS = (
    "metaloom.flows.rollouts.local_cluster",
    "metaloom.flows.rollouts.workers",
    "metaloom.flows.rollouts.supervised",
)
_REHEARSALS = ("metaloom.pipeline.envs.registry", "metaloom.pipeline.global_random")
_VARYING = ("PYTEST_", "METALOOM_", "AWS_", "TMPDIR", "PYTHONPATH", "COLUMNS", "PWD")
"""Variables that are looked up when they are needed."""
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""Without these, libraries start threads when they are imported, which a fork lacks."""
_CLONE = {"x86_64": 56, "aarch64": 220}.get(platform.machine())
_CLONE_PARENT = 0x8000
_PR_SET_MM, _PR_SET_MM_MAP = 35, 14

_libc = ctypes.PyDLL(None, use_errno=True)
_libc.sbrk.restype = ctypes.c_void_p
_start_anew = _posixsubprocess.fork_exec
_kept: list[object] = []
_warm: dict["_Kind", "_Warm"] = {}
_asked = Counter["_Kind"]()
_lock = RLock()


class _Kind(NamedTuple):
    """What processes have in common that are forked from the same one."""

    flags: tuple[str, ...]
    modules: tuple[str, ...]
    variables: frozenset[tuple[str, str]]


class _Warm:
    """A process that has imported, and forks whenever it is asked to."""

    def __init__(self, kind: _Kind, environ: Mapping[str, str]) -> None:
        self._asks, theirs = socket.socketpair()
        code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import warm; warm.serve()"
        command = [sys.executable, *kind.flags, "-c", code, str(theirs.fileno()), *kind.modules]
        ours = {name: value for name, value in environ.items() if not name.startswith("METALOOM_")}
        with theirs:
            self._process = subprocess.Popen(
                command, env=ours | _PATH, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
            )
        atexit.register(self._end)

    def fork(self, told: dict[str, Any], descriptors: Sequence[int]) -> int:
        text = json.dumps(told).encode()
        socket.send_fds(self._asks, [len(text).to_bytes(8, "big")], list(descriptors))
        self._asks.sendall(text)
        answer = self._asks.recv(8)
        assert answer, "the process to fork from has ended"
        return int.from_bytes(answer, "big")

    def _end(self) -> None:
        self._asks.close()
        self._process.wait()


_PATH = {"PYTHONPATH": os.environ["PYTHONPATH"]} if "PYTHONPATH" in os.environ else {}


@contextmanager
def forked_processes() -> Iterator[None]:
    """Fork the processes of Python that are started meanwhile and import Metaloom, where this kind of machine is known.

    A module about what a process imports, or when, leaves this out.
    """
    if _CLONE is not None:
        _posixsubprocess.fork_exec = subprocess._fork_exec = _fork_exec
    try:
        yield
    finally:
        _posixsubprocess.fork_exec = subprocess._fork_exec = _start_anew


def _fork_exec(*arguments: Any) -> int:
    """Stand for `_posixsubprocess.fork_exec`."""
    command, _, close, keep, folder, variables, stdin, _, _, stdout, _, stderr, _, told, _, session, group = arguments[
        :17
    ]
    gid, groups, uid, umask, act = arguments[17:22]
    command = [os.fsdecode(part) for part in command]
    environ = dict(os.environ) if variables is None else dict(_named(variables))
    kind = _kind(command, environ)
    plain = close and (gid, groups, uid, umask, act) == (None, None, None, -1, None)
    if kind is None or not plain or not os.path.isdir(folder or "."):
        return _start_anew(*arguments)
    with _lock:
        _asked[kind] += 1
        if _asked[kind] == 1:  # most kinds have one process alone
            return _start_anew(*arguments)
        if kind not in _warm:
            _warm[kind] = _Warm(kind, environ)
        streams = [number if given == -1 else given for number, given in enumerate((stdin, stdout, stderr))]
        passed = [number for number in keep if number > 2 and number != told]
        ignored = [number for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN]
        about = {
            "command": command,
            "environ": environ,
            "folder": os.path.join(os.getcwd(), os.fsdecode(folder or "")),
            "numbers": [0, 1, 2, *passed],
            "session": session,
            "group": group,
            "blocked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
            "ignored": [int(number) for number in ignored],
            "umask": int(Path("/proc/thread-self/status").read_text().partition("Umask:")[2].split()[0], 8),
        }
        return _warm[kind].fork(about, [*streams, *passed])


def _named(variables: Sequence[bytes]) -> Iterator[tuple[str, str]]:
    for variable in variables:
        name, _, value = os.fsdecode(variable).partition("=")
        yield name, value


def _kind(command: list[str], environ: Mapping[str, str]) -> _Kind | None:
    """Return the kind of a command; None for those that are started anew."""
    if command[0] != sys.executable or not _ONE_THREAD.items() <= environ.items():
        return None
    flags = []
    for at, part in enumerate(command[1:-1], 1):
        if part in ("-c", "-m"):
            what = command[at + 1]
            break
        if part not in ("-B", "-P", "-u"):
            return None
        flags.append(part)
    else:
        return None
    if command[-1] == "--multiprocessing-fork":
        modules = _WORKERS
    elif (part, what) == ("-m", "dask"):
        modules = (*_WORKERS, "distributed.cli.dask_scheduler", "distributed.cli.dask_worker")
    elif what == "metaloom.pipeline.envs.rehearsal":
        modules = _REHEARSALS
    elif what == "metaloom.flows.cli" or (part == "-c" and "metaloom" in what):
        modules = _COMMANDS
    else:
        return None
    constant = {item for item in environ.items() if not item[0].startswith(_VARYING)}
    return _Kind(tuple(flags), modules, frozenset(constant))


def serve() -> None:
    """Import, and fork when asked to; return in the forks, when they have run what they stand for."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asks = socket.socket(fileno=int(sys.argv[1]))
    named = os.environ["PYTHONPATH"].split(os.pathsep) if "PYTHONPATH" in os.environ else []
    ours = [entry for entry in sys.path[1:] if entry not in ("", *named)]
    sys.path[:] = [*named, *ours]
    gc.disable()  # of what is imported all stays
    for module in sys.argv[2:]:
        importlib.import_module(module)
    gc.freeze()
    gc.enable()
    while True:
        head, descriptors, _, _ = socket.recv_fds(asks, 8, 253)
        if not head:
            os._exit(0)
        text = b""
        while len(text) < int.from_bytes(head, "big"):
            text += asks.recv(2**20)
        pid = _cloned()
        if pid == 0:
            break
        for descriptor in descriptors:
            os.close(descriptor)
        asks.sendall(pid.to_bytes(8, "big"))
    asks.close()
    told = json.loads(text)
    _become(told, descriptors, ours)
    _run(told["command"])


def _cloned() -> int:
    """Fork a child of this process's parent."""
    ctypes.pythonapi.PyOS_BeforeFork()
    pid = _libc.syscall(_CLONE, _CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0)
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
    else:
        ctypes.pythonapi.PyOS_AfterFork_Parent()
        assert pid > 0, os.strerror(ctypes.get_errno())
    return pid


def _become(told: dict[str, Any], descriptors: list[int], path: list[str]) -> None:
    """Take over what a new process would have."""
    numbers = told["numbers"]
    high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, max(numbers) + 1) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for descriptor, number in zip(high, numbers, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    if told["session"]:
        os.setsid()
    if told["group"] >= 0:
        os.setpgid(0, told["group"])
    os.umask(told["umask"])
    os.chdir(told["folder"])
    os.environ.clear()
    os.environ.update(told["environ"])
    _show(told["command"], told["environ"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in told["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, told["blocked"])
    command = told["command"]
    at = next(n for n, part in enumerate(command) if part in ("-c", "-m"))
    first = [] if "-P" in command[:at] else ["" if command[at] == "-c" else told["folder"]]
    theirs = told["environ"].get("PYTHONPATH")
    sys.path[:] = [*first, *(theirs.split(os.pathsep) if theirs else ()), *path]
    sys.argv[:], sys.orig_argv[:] = [command[at], *command[at + 2 :]], command
    sys.path_importer_cache.clear()
    importlib.invalidate_caches()
    tempfile.tempdir = None
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    unbuffered = bool(told["environ"].get("PYTHONUNBUFFERED")) or "-u" in command[:at]
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        old = getattr(sys, name)
        raw = io.FileIO(number, "wb" if number else "rb", closefd=False)
        buffered = raw if number and unbuffered else (io.BufferedWriter if number else io.BufferedReader)(raw)
        whole_lines = number == 2 or raw.isatty()
        new = io.TextIOWrapper(buffered, old.encoding, old.errors, line_buffering=whole_lines, write_through=unbuffered)
        _kept.append(old)
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)


def _show(command: list[str], environ: Mapping[str, str]) -> None:
    """Have /proc show a command and variables as this process's."""
    argv = b"".join(os.fsencode(part) + b"\0" for part in command)
    variables = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environ.items())
    memory = ctypes.create_string_buffer(argv + variables)
    _kept.append(memory)
    at = ctypes.addressof(memory)
    stat = [0, 0, 0, *Path("/proc/self/stat").read_text().rpartition(")")[2].split()]
    code, data, stack = (stat[26], stat[27]), (stat[45], stat[46], stat[47]), stat[28]
    places = [*map(int, (*code, *data)), _libc.sbrk(0), int(stack)]
    places += [at, at + len(argv), at + len(argv), at + len(argv) + len(variables)]
    layout = struct.pack("=11QQII", *places, 0, 0, 2**32 - 1)
    done = _libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, ctypes.c_char_p(layout), len(layout), 0)
    assert done == 0, os.strerror(ctypes.get_errno())


def _run(command: list[str]) -> None:
    at = next(n for n, part in enumerate(command) if part in ("-c", "-m"))
    main = types.ModuleType("__main__")
    main.__builtins__ = builtins
    _kept.append(sys.modules["__main__"])
    sys.modules["__main__"] = main
    if command[at] == "-c":
        exec(compile(command[at + 1], "<string>", "exec"), vars(main))
    else:
        name = command[at + 1]
        if not hasattr(sys.modules.get(name), "__path__"):  # of a package, another module runs
            sys.modules.pop(name, None)
        runpy._run_module_as_main(name)

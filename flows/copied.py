"""Running work in a forked copy of this process, so that this process's memory does not change."""

import logging
import math
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from logging.handlers import QueueHandler
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from queue import SimpleQueue
from typing import Never, TypeVar

_LOOK_SECONDS = 0.1
_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM)


T = TypeVar("T")


def result_in_copy(work: Callable[[], T], seconds: float, should_stop: Callable[[], bool]) -> T | None:
    """Return the result of `work` in a forked copy of this process; None if it fails, takes too long or is stopped.

    The copy has one thread, so the work must not use a pool, event loop or GPU of this process.

    Args:
        work: Function to call; a result that cannot be pickled counts as a failure.
        seconds: Time after which the system ends the copy, whatever the copy is doing.
        should_stop: Function called while waiting; if it returns True, the copy is ended.

    Raises:
        ChildProcessError: the work ended its process; the message is the exit code or signal.
    """
    receiver, sender = Pipe(duplex=False)
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, ValueError, OSError):  # the stream may be closed
            stream.flush()  # otherwise both processes would write the buffered text
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns in a process with threads
        pid = os.fork()
    if pid == 0:
        receiver.close()  # otherwise sending would block if the first process is killed
        _send(work, seconds, sender, before)
    answer: tuple[T | None, list[logging.LogRecord]] | None = None
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        sender.close()
        deadline, ended = time.monotonic() + seconds + 1, False
        while not (ready := receiver.poll(_LOOK_SECONDS)) and not ended:
            if should_stop() or time.monotonic() > deadline:
                return None
            # A process that the work has started may keep the pipe open after the copy has ended.
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        with suppress(EOFError, OSError):  # the copy ended, perhaps while it was sending
            answer = receiver.recv() if ready else None
    finally:
        os.kill(pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        receiver.close()
    if answer is None and code != -signal.SIGALRM:
        raise ChildProcessError(f"exit code {code}" if code >= 0 else signal.Signals(-code).name)
    result, records = answer or (None, [])
    for record in records if result is not None else ():  # after a failure, the work is repeated in this process
        logging.getLogger(record.name).handle(record)
    return result


def _send(work: Callable[[], T], seconds: float, sender: Connection, mask: Iterable[int]) -> Never:
    try:
        for number in _HANDLED:  # these signals must end the copy; the handlers are for the first process
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.alarm(math.ceil(seconds))  # for a copy whose first process is killed; the work may cancel it
        records = SimpleQueue[logging.LogRecord]()
        logging.getLogger().handlers[:] = [QueueHandler(records)]
        warnings.showwarning = lambda *_: None  # warnings are shown when the first process does the work
        answer = ForkingPickler.dumps((None, []))
        with suppress(BaseException):  # from the work, or from pickling its result
            result = work()
            answer = ForkingPickler.dumps((result, [records.get() for _ in range(records.qsize())]))
        sender.send_bytes(answer)
    finally:
        os._exit(0)

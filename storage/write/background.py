"""Work done behind the caller's back, in order, with a short queue and errors that come home."""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

Job = TypeVar("Job")


class BackgroundQueue(Generic[Job]):
    """One thread that works off jobs in the order they are given.

    Args:
        work: called with every job, in the thread.
        depth: jobs that may wait; `submit` blocks while there are more.
    """

    def __init__(self, work: Callable[[Job], None], depth: int) -> None:
        self._work = work
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._slots = threading.Semaphore(depth + 1)  # one more is being worked on
        self._idle = threading.Condition()
        self._unfinished = 0
        self._error: BaseException | None = None
        # A daemon: a process that dies without closing must not hang; what was not committed is computed again.
        self._thread = threading.Thread(target=self._run, name="metaloom-store", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queue a job; waits while the queue is full. Raises the first error of an earlier job."""
        self._slots.acquire()
        with self._idle:
            if self._error is None:
                self._unfinished += 1
                self._jobs.put(job)
                return
        self._slots.release()
        self.check()

    def wait(self) -> None:
        """Return when every job is done. Raises the first error."""
        with self._idle:
            self._idle.wait_for(lambda: self._unfinished == 0)
        self.check()

    def check(self) -> None:
        """Raise the first error of a job, the same one every time."""
        if self._error is not None:
            raise self._error

    @property
    def failed(self) -> bool:
        """True once a job has raised an error."""
        return self._error is not None

    def stop(self) -> None:
        """Finish the queued jobs and end the thread. Raises nothing."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if self._error is None:
                try:
                    self._work(job)
                except BaseException as error:
                    # Later jobs build on this one: they are dropped, and the caller is told at its next call.
                    self._error = error
            self._slots.release()
            with self._idle:
                self._unfinished -= 1
                self._idle.notify_all()
